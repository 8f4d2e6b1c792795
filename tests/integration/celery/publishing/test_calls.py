"""The row that a call inside a transaction writes, and the calls that write none. No broker runs: none is needed."""

import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID

import pytest
from celery import chord
from celery.result import GroupResult
from celery.signals import after_task_publish, before_task_publish
from django.db import transaction
from django.urls import reverse
from kombu.exceptions import EncodeError, OperationalError

import outbox.celery
from exactly_once.telemetry.tracing import Cause, caused_by
from exactly_once.wire.formats import Wire
from outbox import InvalidMessage, PayloadTooLarge
from outbox.celery import OutboxTask
from outbox.models import OutboxMessage
from outbox.states import State
from outbox.testing import assert_published, run_relay
from tests.support import ROOT
from tests.support.admin_names import DETAIL, LIST, VIEW
from tests.support.admin_pages import Page, shown, staff_client
from tests.support.apps.effects.models import Effect
from tests.support.relaying import drained
from tests.support.signals import listening

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NO_BROKER = "amqp://guest:guest@127.0.0.1:1//"
TASK_ID = "0f7a2c1e-5b7d-4f0a-9c55-3a1f0a3f2a10"
AMQP = {"BROKER_URL": NO_BROKER}
REDIS = {"BROKER_URL": "redis://127.0.0.1:1/0"}


@pytest.fixture(autouse=True)
def _outbox(settings):
    settings.OUTBOX = AMQP


@pytest.fixture
def app(make):
    return make(NO_BROKER, task_publish_retry=False, broker_connection_timeout=1)


@pytest.fixture
def add(app):
    return app.tasks["tests.add"]


def rows(using="default"):
    return list(OutboxMessage.objects.using(using).order_by("pk"))


def the_row():
    [row] = rows()
    return row


def wire_of(row):
    return Wire.from_text(row.wire)


def called(task, *args, **options):
    with transaction.atomic():
        return task.apply_async(args, **options)


@pytest.mark.every_database
class TestCall:
    def test_apply_async_writes_a_row_with_the_task_id(self, add):
        result = called(add, 1, 2)

        row = the_row()
        assert str(row.message_id) == row.biz_id == result.id
        assert (row.topic, row.key, row.state) == ("celery.tests.add", "", State.READY)
        assert bytes(row.body) == b'[[1, 2], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'

    def test_delay_writes_a_row_that_the_helpers_for_tests_find(self, add):
        with transaction.atomic():
            result = add.delay(1, y="two")

        message = assert_published("celery.tests.add", payload__0__0=1, payload__1__y="two", biz_id=result.id)
        assert [sent.headers["task"] for sent in run_relay()] == ["tests.add"]
        assert_published("celery.tests.add", id=message.id, state="published")

    def test_class_based_task_that_is_not_registered_writes_a_row_of_the_current_app(self, app, current):
        class Receipt(OutboxTask):
            name = "tests.receipt"

            def run(self):
                pass

        current(app)
        called(Receipt())

        assert the_row().topic == "celery.tests.receipt"

    def test_call_in_a_savepoint_that_is_rolled_back_leaves_no_row(self, add):
        with transaction.atomic():
            add.delay(1, 2)
            with suppress(ZeroDivisionError), transaction.atomic():
                add.delay(3, 4)
                raise ZeroDivisionError

        assert wire_of(the_row()).headers["argsrepr"] == "(1, 2)"

    @pytest.mark.long
    def test_call_outside_a_transaction_goes_to_the_broker(self, add):
        with pytest.raises(OperationalError):
            add.delay(1, 2)

        assert rows() == []

    @pytest.mark.long
    def test_outbox_using_writes_the_row_to_another_database(self, app):
        def nothing():
            pass

        other = app.task(nothing, base=OutboxTask, name="tests.other", shared=False, outbox_using="other")
        with transaction.atomic(using="other"):
            other.delay()
        with transaction.atomic(), pytest.raises(OperationalError):
            other.delay()

        assert (len(rows("other")), rows()) == (1, [])

    @pytest.mark.parametrize("revoke", ["result", "id", "group"])
    def test_revoking_a_task_cancels_its_row(self, app, add, revoke):
        kept = called(add, 1, 1, countdown=60)
        result = called(add, 1, 2, countdown=60)
        revoked = {
            "result": result.revoke,
            "id": partial(app.control.revoke, result.id),
            "group": GroupResult("a group", [result], app=app).revoke,
        }[revoke]

        with pytest.raises(OperationalError):  # Celery also sends it to the workers
            revoked()

        assert {row.biz_id: row.state for row in rows()} == {kept.id: State.SCHEDULED, result.id: State.CANCELLED}

    def test_revoking_a_task_in_a_transaction_is_rolled_back_with_it(self, add):
        result = called(add, 1, 2, countdown=60)

        with suppress(ZeroDivisionError), transaction.atomic():
            with pytest.raises(OperationalError):
                result.revoke()
            raise ZeroDivisionError

        assert the_row().state == State.SCHEDULED

    def test_revoking_a_task_that_was_sent_or_never_written_is_celerys(self, app, add):
        with pytest.raises(OperationalError):
            app.control.revoke([TASK_ID, "not a UUID"])

        assert rows() == []

    def test_eager_call_runs_at_once_and_writes_no_row(self, make):
        app = make(NO_BROKER, task_always_eager=True)

        with transaction.atomic():
            assert app.tasks["tests.add"].delay(1, 2).get() == 3

        assert rows() == []

    @pytest.mark.parametrize(
        "call",
        [
            lambda task: transaction.on_commit(lambda: task.delay(1, 2)),
            lambda task: transaction.on_commit(partial(task.apply_async, [1, 2]), robust=True),
            lambda task: task.delay_on_commit(1, 2),
        ],
        ids=["delay", "robust", "delay_on_commit"],
    )
    def test_call_in_an_on_commit_hook_is_warned_of_once_with_the_remedy(self, make, caplog, call, monkeypatch):
        app = make("memory://")
        monkeypatch.setattr(outbox.celery, "_warned", set())
        for _ in range(2):
            with transaction.atomic():
                call(app.tasks["tests.add"])

        [record] = [record for record in caplog.records if record.name == "outbox.celery"]
        assert record.levelname == "WARNING"
        assert "The task tests.add is called in an on_commit hook of 'default'" in record.getMessage()
        assert "Call it inside the transaction, without on_commit" in record.getMessage()

    def test_call_outside_of_a_hook_is_not_warned_of(self, make, caplog):
        """Also in the hook of another database, and in a hook that begins a transaction of its own."""
        add = make("memory://").tasks["tests.add"]

        def in_its_own():
            with transaction.atomic():
                add.delay(1, 2)

        add.delay(1, 2)
        with transaction.atomic(using="other"):
            transaction.on_commit(lambda: add.delay(1, 2), using="other")
        with transaction.atomic():
            transaction.on_commit(in_its_own)

        assert len(rows()) == 1
        assert not [record for record in caplog.records if record.name == "outbox.celery"]

    def test_call_with_a_connection_or_producer_does_not_use_them(self, app, add):
        with transaction.atomic(), app.connection_for_write() as connection, app.amqp.producer_pool.acquire() as producer:
            add.apply_async([1, 2], connection=connection)
            add.apply_async([1, 2], producer=producer, retry=True, retry_policy={"max_retries": 100})
            add.apply_async([1, 2], publisher=producer)

        assert len(rows()) == 3


class TestTaskId:
    def test_task_id_that_is_not_a_uuid_is_the_biz_id_only(self, add):
        called(add, 1, 2, task_id="order-17")

        assert the_row().biz_id == wire_of(the_row()).headers["id"] == "order-17"
        assert isinstance(the_row().message_id, UUID)

    def test_task_id_may_be_used_twice(self, add):
        with transaction.atomic():
            for _ in range(3):
                add.apply_async([1, 2], task_id=TASK_ID)

        assert [row.biz_id for row in rows()] == [TASK_ID] * 3
        assert len({row.message_id for row in rows()}) == 3
        assert str(rows()[0].message_id) == TASK_ID

    @pytest.mark.parametrize("task_id", ["x" * 300, "a\0b", "{0f7a2c1e-5b7d-4f0a-9c55-3a1f0a3f2a10}"])
    def test_task_id_of_any_text_is_sent_unchanged(self, task_id, settings, add):
        settings.OUTBOX = REDIS
        called(add, 1, 2, task_id=task_id)

        assert wire_of(the_row()).headers["id"] == task_id
        assert str(the_row().message_id) != task_id

    def test_ids_of_the_current_cause_are_stored_with_the_row(self, add):
        with caused_by(Cause(message_id="cause", correlation_id="first", traceparent="00-trace")):
            called(add, 1, 2)

        row = the_row()
        assert (row.causation_id, row.correlation_id, row.traceparent) == ("cause", "first", "00-trace")

    def test_parent_id_and_root_id_are_stored_as_the_cause(self, add):
        called(add, 1, 2, root_id="root", parent_id="parent", headers={"traceparent": "00-given"})

        row = the_row()
        assert (row.causation_id, row.correlation_id, row.traceparent) == ("parent", "root", "00-given")


@pytest.mark.every_database
class TestTimes:
    def test_countdown_schedules_the_row_from_the_time_of_the_call(self, add):
        before = datetime.now(tz=UTC)
        called(add, 1, 2, countdown=600)
        after = datetime.now(tz=UTC)

        row = the_row()
        assert row.state == State.SCHEDULED
        assert row.deliver_at == row.available_at == datetime.fromisoformat(wire_of(row).headers["eta"])
        assert before <= row.deliver_at - timedelta(minutes=10) <= after

    @pytest.mark.parametrize(
        ("eta", "due"),
        [
            (datetime(2100, 1, 1, 12, tzinfo=UTC), "2100-01-01T12:00:00+00:00"),
            (datetime.fromisoformat("2100-01-01T12:00:00+05:30"), "2100-01-01T06:30:00+00:00"),
            (datetime(2100, 1, 1, 12), "2100-01-01T12:00:00+00:00"),  # noqa: DTZ001 - Celery takes it for UTC
            ("2100-01-01T12:00:00Z", "2100-01-01T12:00:00+00:00"),
        ],
        ids=str,
    )
    def test_eta_schedules_the_row_and_stays_in_the_message(self, eta, due, add):
        called(add, 1, 2, eta=eta)

        assert the_row().deliver_at == datetime.fromisoformat(due)
        assert wire_of(the_row()).headers["eta"] == (eta if isinstance(eta, str) else eta.isoformat())

    @pytest.mark.parametrize("past", [{"countdown": 0}, {"countdown": -5}, {"eta": datetime(2020, 1, 1, tzinfo=UTC)}], ids=str)
    def test_past_eta_or_countdown_makes_the_row_ready(self, past, add):
        called(add, 1, 2, **past)

        assert (the_row().state, the_row().deliver_at) == (State.READY, None)

    @pytest.mark.parametrize("end", [timedelta(hours=1), 3600, "2100-01-01T12:00:00+00:00"], ids=str)
    def test_expires_of_a_task_is_that_of_its_row(self, end, add):
        expires = datetime.now(tz=UTC) + end if isinstance(end, timedelta) else end
        called(add, 1, 2, expires=expires)

        sent = datetime.fromisoformat(wire_of(the_row()).headers["expires"])
        assert abs(the_row().expires_at - sent) < timedelta(seconds=30), "the row counts by the database's clock"

    def test_expires_counts_from_the_call_when_the_task_is_delayed(self, add):
        called(add, 1, 2, countdown=600, expires=900)

        row = the_row()
        assert abs(row.expires_at - row.deliver_at - timedelta(minutes=5)) < timedelta(seconds=30)
        assert int(wire_of(row).properties["expiration"]) == pytest.approx(300_000, abs=30_000)


class TestPriority:
    @pytest.mark.parametrize(("given", "kept"), [(0, 0), (4, 4), (9, 9), (200, 9)])
    def test_priority_of_the_task_is_that_of_the_row_up_to_nine(self, given, kept, add):
        called(add, 1, 2, priority=given)

        assert (the_row().priority, wire_of(the_row()).priority) == (kept, given)

    def test_priority_does_not_order_rows_of_other_brokers_than_rabbitmq(self, settings, add):
        settings.OUTBOX = REDIS
        called(add, 1, 2, priority=9)

        assert (the_row().priority, wire_of(the_row()).priority) == (0, 9)


class TestSignals:
    def test_publish_signals_of_celery_are_sent_at_the_call_and_may_change_the_message(self, add):
        heard = []

        def before(sender, headers, properties, **_):
            headers["tenant"], properties["app_id"] = "acme", "shop"
            heard.append(f"before {sender}")

        def after(sender, **_):
            heard.append(f"after {sender}, {len(rows())} row")

        with listening(before_task_publish, before), listening(after_task_publish, after):
            called(add, 1, 2)

        assert heard == ["before tests.add", "after tests.add, 1 row"]
        assert (wire_of(the_row()).headers["tenant"], wire_of(the_row()).properties["app_id"]) == ("acme", "shop")

    def test_task_sent_event_is_not_sent(self, make):
        app = make(NO_BROKER, task_send_sent_event=True)

        called(app.tasks["tests.add"], 1, 2)

        assert the_row().topic == "celery.tests.add"


class TestRefusedCalls:
    @pytest.fixture(autouse=True)
    def _nothing_is_written(self):
        yield
        assert rows() == []

    def test_body_over_the_limit_is_refused(self, settings, add):
        settings.OUTBOX = {**AMQP, "BODY_LIMIT_BYTES": 1000}
        with pytest.raises(PayloadTooLarge, match=r"tests\.add have 1\d\d\d bytes as application/json"):
            called(add, "x" * 1000, 2)

    @pytest.mark.parametrize("value", [object(), UUID(TASK_ID), 2**64, "x" * 200_000], ids=["object", "UUID", "2**64", "large"])
    def test_header_that_rabbitmq_cannot_carry_is_refused(self, value, add):
        with pytest.raises(InvalidMessage, match=r"tests\.add cannot be written to the outbox"):
            called(add, 1, 2, headers={"tenant": value})

    def test_reply_to_that_is_too_long_is_refused(self, add):
        with pytest.raises(InvalidMessage):
            called(add, 1, 2, reply_to="x" * 256)

    def test_task_protocol_1_is_refused(self, make):
        with pytest.raises(InvalidMessage, match="task_protocol is 1"):
            called(make(NO_BROKER, task_protocol=1).tasks["tests.add"], 1, 2)

    def test_arguments_that_cannot_be_serialised_are_refused_and_the_transaction_continues(self, add):
        with transaction.atomic():
            with pytest.raises(EncodeError):
                add.delay(object(), 1)
            Effect.objects.create(name="goes on")

        assert Effect.objects.filter(name="goes on").exists()

    def test_wrong_number_of_arguments_is_refused(self, add):
        with pytest.raises(TypeError):
            called(add, 1, 2, 3)


class TestRow:
    def test_local_transport_refuses_the_row_of_a_call(self, settings, add):
        settings.OUTBOX = {}
        called(add, 1, 2)
        drained("local://")

        assert the_row().state == State.RETRYING
        assert "celery.tests.add is in the format of another protocol" in the_row().last_error

    def test_admin_finds_the_row_by_the_name_or_the_id_of_the_task(self, add):
        called(add, 1, 2, task_id=TASK_ID)
        client, found = staff_client(VIEW), {the_row().pk}

        assert shown(client, q="tests.add") == shown(client, q="celery.tests.*") == shown(client, q=TASK_ID) == found
        assert shown(client, q="tests.write") == set()

    def test_admin_shows_the_routing_and_the_headers_of_the_call(self, add):
        called(add, 1, 2, queue="second", headers={"tenant": "acme"})

        page = Page(staff_client(VIEW).get(reverse(DETAIL, args=[the_row().pk])))

        for expected in ('"routing_key": "second"', '"tenant": "acme"', '"argsrepr": "(1, 2)"', '"callbacks": null'):
            assert expected in page.text

    @pytest.mark.parametrize(
        "wire",
        ["", "{", "[]", '"text"', "{}", "[" * 100_000],
        ids=["empty text", "truncated", "list", "text", "empty object", "deep"],
    )
    def test_admin_shows_a_row_whose_wire_form_is_unreadable(self, wire, add):
        called(add, 1, 2, serializer="pickle")
        OutboxMessage.objects.update(wire=wire)
        client = staff_client(VIEW)

        assert "celery.tests.add" in Page(client.get(reverse(DETAIL, args=[the_row().pk]))).text
        assert "celery.tests.add" in Page(client.get(reverse(LIST))).text


@pytest.mark.django_db
class TestInDjangoTestCase:
    pytestmark = pytest.mark.django_db(transaction=False)

    @pytest.mark.long
    def test_transaction_of_the_test_case_does_not_count(self, add):
        with pytest.raises(OperationalError):
            add.delay(1, 2)
        called(add, 1, 2)

        assert len(rows()) == 1


def test_outbox_task_can_be_imported_before_django_setup():
    code = "from outbox.celery import OutboxTask; from celery import Celery; Celery(task_cls=OutboxTask).finalize()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={"PATH": ""})


def test_task_cls_accepts_the_import_path_of_outbox_task(make):
    app = make(NO_BROKER, task_cls="outbox.celery:OutboxTask")

    assert isinstance(app.tasks["celery.chord_unlock"], OutboxTask)


def test_chord_with_a_backend_without_native_chords_is_rows_if_outbox_task_is_the_task_cls(make, tmp_path):
    app = make(NO_BROKER, f"file://{tmp_path}", task_cls="outbox.celery:OutboxTask")
    add, total = app.tasks["tests.add"], app.tasks["tests.total"]

    with transaction.atomic():
        chord([add.s(1, 2), add.s(3, 4)])(total.s())

    assert sorted(row.topic for row in rows()) == ["celery.celery.chord_unlock", "celery.tests.add", "celery.tests.add"]

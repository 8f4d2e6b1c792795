"""Callbacks: called for what was committed, until they return, with one effect in the outbox's database."""

import json
import logging
from contextlib import suppress
from datetime import timedelta
from functools import partial

import pytest
from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.models.signals import pre_delete
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.formats import Wire
from outbox import on_dead, on_published, restore
from outbox.callbacks import registry
from outbox.conf import outbox_options
from outbox.models import OutboxMessage, PendingCallback
from outbox.operators.relays import call_now, discard_call
from outbox.relay import callback_worker
from outbox.relay.service import serve
from outbox.states import RESTORE, State
from outbox.store import decision_rows, history, pending_callbacks, settling
from tests.support.apps.effects.models import Effect, Unique
from tests.support.commands import output_of
from tests.support.deliveries import at_once
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.relaying import TOPIC, published, row_of, set_columns, state_of
from tests.support.sql import while_another_session

pytestmark = pytest.mark.django_db
every_database = pytest.mark.every_database

MAX_ATTEMPTS = 2


@pytest.fixture(autouse=True)
def peer():
    with FakeAmqpPeer() as peer, override_settings(OUTBOX={"BROKER_URL": peer.url, "MAX_ATTEMPTS": MAX_ATTEMPTS}):
        yield peer


def relay():
    """Publish and call everything that is due."""
    serve("default", drain=True)


def refused_at_its_last_attempt(peer, **options):
    """A message that is dead after the next pass, because the broker refuses it."""
    peer.script = lambda message: [partial(peer.nack, message)]
    message = published(**options)
    set_columns(message, attempts=MAX_ATTEMPTS - 1)
    return message


def pending():
    return PendingCallback.objects.get()


def effects():
    return sorted(Effect.objects.values_list("name", flat=True))


def due_now():
    return PendingCallback.objects.update(available_at=DatabaseTime())


def failing(message):
    Effect.objects.create(name="undone")
    raise LookupError("no such order")


class TestCallbackMessage:
    @every_database
    def test_callback_receives_a_published_message_once(self, add_callback):
        calls = add_callback()

        message = published(payload={"order_id": 17}, biz_id="order-17", key="customer-3", headers={"tenant": "acme"})
        relay()
        relay()

        [one] = calls
        row = row_of(message)
        assert (one.event, one.error, one.state, one.attempts, one.call) == ("published", "", State.PUBLISHED, 1, 1)
        assert (one.id, one.topic, one.biz_id, one.key) == (message.id, TOPIC, "order-17", "customer-3")
        assert (one.payload, one.headers) == ({"order_id": 17}, {"tenant": "acme"})
        assert (one.correlation_id, one.causation_id) == (row.correlation_id, row.causation_id)
        assert one.using == "default"
        assert (one.created_at, one.settled_at) == (row.created_at, row.settled_at)
        assert not PendingCallback.objects.exists()

    def test_callback_receives_a_dead_message_each_time_it_dies_and_its_error_also_after_a_restore(self, add_callback, peer):
        calls, others = add_callback(lambda message: 1 / 0 if message.call == 1 else None, on=on_dead), add_callback()
        message = refused_at_its_last_attempt(peer)
        relay()
        due_now()
        relay()
        for _ in range(2):
            decision_rows.decide("default", RESTORE, [message.position])
            set_columns(message, attempts=MAX_ATTEMPTS - 1)
            relay()
            peer.script = lambda message: [partial(peer.ack, message)]
        due_now()
        relay()

        found = [(one.event, one.call, one.state, one.id) for one in calls]
        assert [one[:3] for one in found] == [
            ("dead", 1, "dead"),
            ("dead", 2, "dead"),
            ("dead", 1, "dead"),
            ("dead", 2, "published"),
        ]
        assert {one[3] for one in found} == {message.id}
        assert all("nack" in one.error and one.headers == {} for one in calls)
        assert [one.event for one in others] == ["published"]

    @every_database
    def test_pending_callback_keeps_its_message_when_a_relay_without_it_publishes_it_without_history(
        self, add_callback, peer, settings
    ):
        settings.OUTBOX = {**settings.OUTBOX, "KEEP_HISTORY": None}
        add_callback(lambda message: 1 / 0, on=on_dead, name="tests.dead")
        message = refused_at_its_last_attempt(peer)
        relay()
        peer.script = lambda message: [partial(peer.ack, message)]
        registry.remove("tests.dead")
        decision_rows.decide("default", RESTORE, [message.position])
        other = published()
        relay()

        assert (state_of(message), OutboxMessage.objects.filter(pk=other.position).exists()) == (State.PUBLISHED, False)
        calls = add_callback(on=on_dead, name="tests.dead")
        due_now()
        relay()
        assert [(one.event, one.call, one.state, one.id) for one in calls] == [("dead", 2, "published", message.id)]

    def test_callback_receives_only_messages_of_its_topic(self, add_callback):
        first, second = add_callback(topic="a"), add_callback(topic="b")

        for topic in "aabx":
            published(topic)
        relay()

        assert [one.topic for one in first + second] == ["a", "a", "b"]

    @pytest.mark.parametrize(
        ("content_type", "body", "payload"),
        [("application/json", b"[[1], {}, {}]", [[1], {}, {}]), ("application/x-python-serialize", b"\x80", b"\x80")],
    )
    def test_callback_receives_the_payload_of_a_celery_task(self, add_callback, content_type, body, payload):
        calls = add_callback(topic="celery.shop.charge")
        message = published("celery.shop.charge")
        wire = Wire("", "direct", "celery", content_type, "utf-8", None, {"task": "shop.charge"}, {})
        set_columns(message, body=body, wire=wire.to_text())

        relay()

        assert [one.payload for one in calls] == [payload]


@every_database
class TestCallbackEffect:
    def test_async_callback_effect_is_committed(self, request):
        async def create(message):
            await Effect.objects.acreate(name=message.biz_id)

        request.addfinalizer(partial(registry.remove, "tests.async"))
        on_published(TOPIC, name="tests.async")(create)
        published(biz_id="order-17")
        relay()

        assert effects() == ["order-17"]

    @pytest.mark.parametrize(
        ("error", "stored"),
        [
            (SystemExit("DE02120300000000202051"), "SystemExit: DE…"),
            (LookupError("no account DE02120300000000202051"), "LookupError: no account DE…"),
        ],
    )
    def test_error_of_a_callback_is_stored_redacted(self, add_callback, settings, error, stored):
        settings.OUTBOX = {**getattr(settings, "OUTBOX", {}), "REDACT_ERRORS": "tests.support.redactors.mask_ibans"}

        def refuse(message):
            raise error

        add_callback(refuse)
        published()

        relay()

        assert pending().last_error == stored

    def test_failed_callback_is_rolled_back_logged_and_called_again(self, add_callback, caplog):
        calls = add_callback(lambda message: failing(message) if message.call == 1 else Effect.objects.create(name="done"))
        unharmed = add_callback()
        published()

        relay()

        assert (len(unharmed), effects()) == (1, [])
        assert (pending().attempts, pending().last_error) == (1, "LookupError: no such order")
        [record] = [record for record in caplog.records if record.name == "outbox.relay.callback_worker"]
        assert record.exc_info is not None
        assert record.levelno == logging.WARNING
        due_now()
        relay()
        assert (len(calls), len(unharmed), effects()) == (2, 1, ["done"])
        assert not PendingCallback.objects.exists()

    @pytest.mark.parametrize("attempts", [MAX_ATTEMPTS - 1, 100])
    def test_callback_that_keeps_failing_is_logged_as_an_error_and_retried_without_limit(self, add_callback, caplog, attempts):
        add_callback(failing)
        published()
        relay()
        PendingCallback.objects.update(attempts=attempts, available_at=DatabaseTime())
        caplog.clear()

        relay()

        assert [record.levelname for record in caplog.records if record.name == "outbox.relay.callback_worker"] == ["ERROR"]
        assert pending().attempts == attempts + 1
        deferred = PendingCallback.objects.filter(
            available_at__gt=DatabaseTime(timedelta(seconds=4)), available_at__lte=DatabaseTime(outbox_options().BACKOFF[1])
        )
        assert deferred.exists()

    def test_callback_that_swallows_a_database_error_is_called_again(self, add_callback):
        def swallowing(message):
            Effect.objects.create(name=f"call {message.call}")
            if message.call == 1:
                try:
                    with transaction.atomic(savepoint=False):
                        Unique.objects.create(name="twice")
                        Unique.objects.create(name="twice")
                except IntegrityError:
                    pass

        add_callback(swallowing)
        published()

        relay()

        assert "its transaction cannot commit" in pending().last_error
        due_now()
        relay()
        assert effects() == ["call 2"]

    def test_callback_is_called_again_soon_after_a_deadlock(self, add_callback):
        class Deadlock(OperationalError):
            sqlstate = "40P01"

        def colliding(message):
            raise Deadlock

        add_callback(colliding)
        published()

        relay()

        assert PendingCallback.objects.filter(available_at__lte=DatabaseTime(timedelta(seconds=2))).exists()


def claim(lease=timedelta(minutes=1)):
    return pending_callbacks.claim_calls("default", 10, lease)


def one_pending():
    """One callback that has not been called yet."""
    published()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outbox.relay.service.callers", lambda *args, **kwargs: ())
        relay()
    return pending()


@every_database
class TestCallbackClaim:
    def test_callback_is_claimed_by_one_of_several_relays_and_a_claim_that_was_taken_over_calls_nothing(self, add_callback):
        calls = add_callback()
        one_pending()
        [stale] = claim()
        assert (stale.number, claim()) == (1, [])
        due_now()
        [current] = claim()

        callback_worker._Callback(stale, outbox_options()).run()
        assert (calls, pending().last_error) == ([], "")
        callback_worker._Callback(current, outbox_options()).run()
        callback_worker._Callback(stale, outbox_options()).run()

        assert [one.call for one in calls] == [2]
        assert not PendingCallback.objects.exists()

    def test_callback_unknown_to_this_process_is_left_and_logged(self, add_callback, caplog):
        calls = add_callback(name="tests.renamed")
        one_pending()
        registry.remove("tests.renamed")
        other = add_callback(name="tests.other", topic="another")

        relay()

        assert (calls, other) == ([], [])
        assert pending().attempts == 0
        assert "1 pending callbacks have names that this process does not know" in caplog.text

    def test_operator_can_call_a_callback_now_or_discard_it(self, add_callback):
        calls = add_callback(failing)
        published()
        relay()

        assert call_now("default", pending().pk)
        relay()
        assert len(calls) == 2
        assert discard_call("default", pending().pk)
        assert not PendingCallback.objects.exists()
        assert not call_now("default", 4711)


# On SQLite the transaction of the callback is the only one that writes.
@pytest.mark.django_db(transaction=True)
def test_running_callback_cannot_be_claimed_called_or_discarded(add_callback):
    add_callback()
    row = one_pending()
    [call] = claim(lease=timedelta())

    with transaction.atomic():
        pending_callbacks.begin_call(call)
        found = at_once([claim, *(partial(ask, "default", row.pk) for ask in (call_now, discard_call))])

    assert found == [[], False, False]


@pytest.mark.django_db(transaction=True)
def test_call_that_another_process_claims_while_it_begins_does_not_begin(add_callback):
    add_callback()
    row = one_pending()
    [call] = claim(lease=timedelta())

    def receive(**kwargs):
        """With a receiver without a sender, Django reads before it deletes."""

    def begins():
        with suppress(pending_callbacks.CallLost):
            return pending_callbacks.begin_call(call)

    pre_delete.connect(receive)
    try:
        assert while_another_session("UPDATE outbox_pendingcallback SET attempts = attempts + 1", begins) is None
    finally:
        pre_delete.disconnect(receive)
    assert PendingCallback.objects.get().pk == row.pk


@every_database
def test_relay_without_callbacks_does_not_touch_the_table_of_pending_callbacks():
    published()

    with CaptureQueriesContext(connection) as asked:
        relay()

    assert OutboxMessage.objects.get().state == State.PUBLISHED
    assert [query for query in asked if OutboxMessage._meta.db_table in query["sql"]]
    touched = [query["sql"] for query in asked if PendingCallback._meta.db_table in query["sql"]]
    # But for two looks at its start: at the columns of the tables, and at their sequences.
    assert all("to_regclass" in sql or "pragma_table_info" in sql or "_seq" in sql for sql in touched)


@every_database
def test_pending_callbacks_of_a_batch_are_inserted_in_one_statement(add_callback):
    add_callback()
    add_callback(on=on_dead)
    for _ in range(5):
        published()

    with CaptureQueriesContext(connection) as asked:
        relay()

    assert len([query for query in asked if query["sql"].startswith(f"INSERT INTO {PendingCallback._meta.db_table}")]) == 1


@every_database
def test_purge_keeps_a_message_that_is_settled_again_during_the_purge(add_callback):
    message = published()
    set_columns(message, state=State.CANCELLED, settled_at=DatabaseTime(timedelta(days=-30)))
    add_callback(failing)

    def meanwhile(execute, sql, *arguments):
        if sql.startswith("DELETE") and state_of(message) == State.CANCELLED:
            assert restore(message.id)
            settling.settle("default", settling.Settlement(published=[message.position]))
        return execute(sql, *arguments)

    with connection.execute_wrapper(meanwhile):
        assert list(history.HISTORY.purge("default", timedelta(days=7))) == [0]

    assert pending().message.message_id == message.id


def test_status_counts_pending_failing_and_unknown_callbacks(add_callback):
    add_callback(failing)
    add_callback(failing, name="tests.removed")
    published()
    relay()
    registry.remove("tests.removed")

    callbacks = json.loads(output_of("exactly_once_status", json=True))["outbox"]["callbacks"]
    lines = [line.split() for line in output_of("exactly_once_status").splitlines()]

    assert callbacks == {"pending": 2, "failing": 2, "unknown": 1, "oldest": OutboxMessage.objects.get().settled_at.isoformat()}
    for line in (["pending", "2"], ["failing", "2"], ["unknown", "to", "this", "code", "1"]):
        assert line in lines

"""Callbacks: told what was committed, until they return, with one effect in the outbox's database."""

from __future__ import annotations

import io
import json
import logging
import sys
from datetime import timedelta
from functools import partial

import pytest
from django.core.management import call_command
from django.db import IntegrityError, OperationalError, connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from outbox import on_dead, on_published, restore, store
from outbox.callbacks import registry
from outbox.conf import outbox_options
from outbox.kernel.clock import DatabaseTime
from outbox.kernel.wire import Wire
from outbox.models import OutboxMessage, PendingCallback, State
from outbox.relay import calling
from tests.support.apps.effects.models import Effect, Unique
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.relaying import TOPIC, in_threads, published, row_of, set_columns, state_of

pytestmark = [pytest.mark.every_database, pytest.mark.django_db]

MAX_ATTEMPTS = 2


@pytest.fixture(autouse=True)
def peer():
    with FakeAmqpPeer() as peer, override_settings(OUTBOX={"BROKER_URL": peer.url, "MAX_ATTEMPTS": MAX_ATTEMPTS}):
        yield peer


@pytest.fixture
def told():
    """Register functions as callbacks for this test: `told(function, on=on_dead)` is the list of what it was told."""
    names = []

    def register(function=None, *, on=on_published, topic=TOPIC, name=None):
        heard = []

        def hear(message):
            heard.append(message)
            if function is not None:
                return function(message)
            return None

        names.append(name or f"tests.callback{len(names)}")
        on(topic, name=names[-1])(hear)
        return heard

    yield register
    for name in names:
        registry.remove(name)


def relay():
    """Carry and call everything that is due."""
    call_command("outbox_relay", drain=True, verbosity=0)


def dying(peer, **options):
    """A message that the broker refuses for the last time."""
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
    def test_callback_receives_a_published_message_once(self, told):
        heard = told()

        message = published(payload={"order_id": 17}, biz_id="order-17", key="customer-3", headers={"tenant": "acme"})
        relay()
        relay()

        [said] = heard
        row = row_of(message)
        assert (said.event, said.error, said.state, said.attempts, said.call) == ("published", "", State.PUBLISHED, 1, 1)
        assert (said.id, said.topic, said.biz_id, said.key) == (message.id, TOPIC, "order-17", "customer-3")
        assert (said.payload, said.headers) == ({"order_id": 17}, {"tenant": "acme"})
        assert (said.correlation_id, said.causation_id) == (row.correlation_id, row.causation_id)
        assert said.using == "default"
        assert (said.created_at, said.settled_at) == (row.created_at, row.settled_at)
        assert not PendingCallback.objects.exists()

    def test_callback_receives_a_dead_message_each_time_it_dies(self, told, peer):
        heard, others = told(on=on_dead), told()
        message = dying(peer)
        relay()
        store.requeue("default", message.position)
        set_columns(message, attempts=MAX_ATTEMPTS - 1)
        relay()

        assert [(said.event, said.state, said.id) for said in heard] == [("dead", State.DEAD, message.id)] * 2
        assert "nack" in heard[0].error
        assert heard[0].headers == heard[1].headers == {}
        assert not others

    def test_callback_receives_the_dead_letter_error_also_after_a_requeue(self, told, peer):
        heard = told(lambda message: 1 / 0 if message.call == 1 else None, on=on_dead)
        message = dying(peer)
        relay()
        store.requeue("default", message.position)
        peer.script = lambda message: [partial(peer.ack, message)]
        relay()
        due_now()
        relay()

        assert state_of(message) == State.PUBLISHED
        assert [(said.event, said.call, said.state) for said in heard] == [("dead", 1, "dead"), ("dead", 2, "published")]
        assert "nack" in heard[1].error

    def test_callback_receives_only_messages_of_its_topic(self, told):
        first, second = told(topic="a"), told(topic="b")

        for topic in "aabx":
            published(topic)
        relay()

        assert [said.topic for said in first + second] == ["a", "a", "b"]

    @pytest.mark.parametrize(
        ("content_type", "body", "payload"),
        [("application/json", b"[[1], {}, {}]", [[1], {}, {}]), ("application/x-python-serialize", b"\x80", b"\x80")],
    )
    def test_callback_receives_the_payload_of_a_celery_task(self, told, content_type, body, payload):
        heard = told(topic="celery.shop.charge")
        message = published("celery.shop.charge")
        wire = Wire("", "direct", "celery", content_type, "utf-8", None, {"task": "shop.charge"}, {})
        set_columns(message, body=body, wire=wire.to_text())

        relay()

        assert [said.payload for said in heard] == [payload]


class TestCallbackEffect:
    def test_callback_effect_is_committed_and_the_pending_callback_deleted(self, told):
        told(lambda message: Effect.objects.create(name=message.biz_id))
        published(biz_id="order-17")

        relay()

        assert effects() == ["order-17"]
        assert not PendingCallback.objects.exists()

    def test_async_callback_effect_is_committed(self, told):
        async def create(message):
            await Effect.objects.acreate(name=message.biz_id)

        on_published(TOPIC, name="tests.async")(create)
        try:
            published(biz_id="order-17")
            relay()
        finally:
            registry.remove("tests.async")

        assert effects() == ["order-17"]

    def test_failed_callback_is_rolled_back_logged_and_called_again(self, told, caplog):
        heard = told(lambda message: failing(message) if message.call == 1 else Effect.objects.create(name="done"))
        unharmed = told()
        published()

        relay()

        assert (len(unharmed), effects()) == (1, [])
        assert (pending().attempts, pending().last_error) == (1, "LookupError: no such order")
        [record] = [record for record in caplog.records if record.name == "outbox.relay.calling"]
        assert record.exc_info is not None
        assert record.levelno == logging.WARNING
        due_now()
        relay()
        assert (len(heard), len(unharmed), effects()) == (2, 1, ["done"])
        assert not PendingCallback.objects.exists()

    @pytest.mark.parametrize("attempts", [MAX_ATTEMPTS - 1, 100])
    def test_callback_that_keeps_failing_is_logged_as_an_error_and_retried_without_limit(self, told, caplog, attempts):
        told(failing)
        published()
        relay()
        PendingCallback.objects.update(attempts=attempts, available_at=DatabaseTime())
        caplog.clear()

        relay()

        assert [record.levelname for record in caplog.records if record.name == "outbox.relay.calling"] == ["ERROR"]
        assert pending().attempts == attempts + 1
        rested = PendingCallback.objects.filter(
            available_at__gt=DatabaseTime(timedelta(seconds=4)),
            available_at__lte=DatabaseTime(outbox_options().RETRY_CAP),
        )
        assert rested.exists()

    def test_callback_that_swallows_a_database_error_is_called_again(self, told):
        def swallowing(message):
            Effect.objects.create(name=f"call {message.call}")
            if message.call == 1:
                try:
                    with transaction.atomic(savepoint=False):
                        Unique.objects.create(name="twice")
                        Unique.objects.create(name="twice")
                except IntegrityError:
                    pass

        told(swallowing)
        published()

        relay()

        assert "its transaction cannot commit" in pending().last_error
        due_now()
        relay()
        assert effects() == ["call 2"]

    def test_callback_is_called_again_soon_after_a_deadlock(self, told):
        class Deadlock(OperationalError):
            sqlstate = "40P01"

        def colliding(message):
            raise Deadlock

        told(colliding)
        published()

        relay()

        assert PendingCallback.objects.filter(available_at__lte=DatabaseTime(timedelta(seconds=2))).exists()

    def test_callback_that_calls_sys_exit_has_failed(self, told):
        told(lambda message: sys.exit(message.call) if message.call == 1 else None)
        published()

        relay()

        assert pending().last_error == "SystemExit: 1"


class TestCallbackClaim:
    def claim(self, lease=timedelta(minutes=1)):
        return store.claim_calls("default", 10, lease)

    def settled(self):
        """One callback that is still to be called."""
        published()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("outbox.relay.service.callers", lambda *ignored: ())
            relay()
        return pending()

    def test_callback_is_claimed_by_one_of_several_relays(self, told):
        told()
        self.settled()

        assert [call.number for call in self.claim()] == [1]
        assert self.claim() == []

    def test_relay_whose_claim_was_taken_over_calls_nothing(self, told):
        heard = told()
        self.settled()
        [dead] = self.claim()
        due_now()
        [alive] = self.claim()

        calling._call(dead, outbox_options())
        assert heard == []
        assert pending().last_error == ""
        calling._call(alive, outbox_options())
        calling._call(dead, outbox_options())

        assert [said.call for said in heard] == [2]
        assert not PendingCallback.objects.exists()

    @pytest.mark.django_db(transaction=True)
    def test_running_callback_cannot_be_claimed_called_or_discarded(self, told):
        if connection.vendor == "sqlite":
            pytest.skip("the callback's transaction is the only one that writes")
        told()
        row = self.settled()
        [call] = self.claim(lease=timedelta())
        found = []

        with transaction.atomic():
            store.begin_call(call)
            operators = (store.call_now, store.discard_call)
            with in_threads(
                lambda: found.append(self.claim()), *(lambda ask=ask: found.append(ask("default", row.pk)) for ask in operators)
            ):
                pass

        assert sorted(found, key=str) == [False, False, []]

    def test_callback_unknown_to_this_process_is_left_and_logged(self, told, caplog):
        heard = told(name="tests.renamed")
        self.settled()
        registry.remove("tests.renamed")
        other = told(name="tests.other", topic="another")

        relay()

        assert (heard, other) == ([], [])
        assert pending().attempts == 0
        assert "1 pending callbacks are of a name that this process does not know" in caplog.text

    def test_operator_can_call_a_callback_now_or_discard_it(self, told):
        heard = told(failing)
        published()
        relay()

        assert store.call_now("default", pending().pk)
        relay()
        assert len(heard) == 2
        assert store.discard_call("default", pending().pk)
        assert not PendingCallback.objects.exists()
        assert not store.call_now("default", 4711)


def test_relay_without_callbacks_does_not_touch_the_table_of_pending_callbacks():
    published()

    with CaptureQueriesContext(connection) as asked:
        relay()

    assert OutboxMessage.objects.get().state == State.PUBLISHED
    assert not [query for query in asked if PendingCallback._meta.db_table in query["sql"]]


def test_pending_callbacks_of_a_batch_are_inserted_in_one_statement(told):
    told()
    told(on=on_dead)
    for _ in range(5):
        published()

    with CaptureQueriesContext(connection) as asked:
        relay()

    assert len([query for query in asked if query["sql"].startswith(f"INSERT INTO {PendingCallback._meta.db_table}")]) == 1


def test_purge_keeps_a_message_until_its_callback_has_returned(told):
    told(failing, topic="kept")
    kept, gone = published("kept"), published("gone")
    relay()
    OutboxMessage.objects.update(settled_at=DatabaseTime(timedelta(days=-30)))

    assert store.purgeable("default", timedelta(days=7)) == 1
    call_command("outbox_purge", verbosity=0, stdout=io.StringIO())

    assert list(OutboxMessage.objects.values_list("message_id", flat=True)) == [kept.id]
    store.discard_call("default", pending().pk)
    assert store.purgeable("default", timedelta(days=7)) == 1
    assert gone.id != kept.id


def test_purge_keeps_a_message_that_is_settled_again_during_the_purge(told):
    message = published()
    set_columns(message, state=State.CANCELLED, settled_at=DatabaseTime(timedelta(days=-30)))
    told(failing)

    def meanwhile(execute, sql, *arguments):
        if sql.startswith("DELETE") and state_of(message) == State.CANCELLED:
            assert restore(message.id)
            store.settle("default", store.Settlement(published=[message.position]))
        return execute(sql, *arguments)

    with connection.execute_wrapper(meanwhile):
        assert list(store.purge_settled("default", timedelta(days=7))) == [0]

    assert pending().message.message_id == message.id


def test_status_counts_pending_failing_and_unknown_callbacks(told):
    told(failing)
    told(failing, name="tests.removed")
    published()
    relay()
    registry.remove("tests.removed")

    def status(**options):
        out = io.StringIO()
        call_command("outbox_status", stdout=out, **options)
        return out.getvalue()

    callbacks = json.loads(status(json=True))["callbacks"]
    lines = [line.split() for line in status().splitlines()]

    assert callbacks == {"pending": 2, "failing": 2, "unknown": 1, "oldest": OutboxMessage.objects.get().settled_at.isoformat()}
    for line in (["pending", "2"], ["failing", "2"], ["unknown", "to", "this", "code", "1"]):
        assert line in lines

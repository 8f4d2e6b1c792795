"""cancel(), reschedule() and publish_now(): in the caller's transaction, with the outcome as the answer."""

import os
import uuid
from collections import Counter
from datetime import timedelta
from functools import partial
from random import Random

import pytest
from asgiref.sync import async_to_sync
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from outbox import (
    Decision,
    Draft,
    InvalidMessage,
    Outcome,
    UnknownMessage,
    acancel,
    apublish_now,
    areschedule,
    cancel,
    publish_many,
    publish_now,
    reschedule,
    restore,
)
from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.deliveries import at_once
from tests.support.relaying import (
    TOPIC,
    drained,
    ids,
    in_hand,
    in_state,
    in_threads,
    published,
    relaying,
    row_of,
    set_columns,
    state_of,
)
from tests.support.sql import executed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])
every_database = pytest.mark.every_database

HOUR = timedelta(hours=1)
A_MOMENT = timedelta(minutes=5)
CANCELLED = Decision(Outcome.CANCELLED, State.CANCELLED)
NOT_FOUND = Decision(Outcome.NOT_FOUND, "")
OPEN = [State.SCHEDULED, State.READY, State.RETRYING, State.WAITING]
ENDED = [State.PUBLISHED, State.EXPIRED, State.CANCELLED, State.ROLLED_BACK]


def is_about(instant, expected):
    return abs(instant - expected) < A_MOMENT


@every_database
class TestCancel:
    @pytest.mark.parametrize("state", [*OPEN, State.DEAD])
    def test_cancel_settles_an_unpublished_message_as_cancelled(self, state):
        message = in_state(state)

        assert cancel(message.id) == CANCELLED
        assert state_of(message) == State.CANCELLED
        assert row_of(message).settled_at is not None

    @pytest.mark.parametrize(
        ("decide", "state"),
        [
            *((decide, state) for state in ENDED for decide in (cancel, partial(reschedule, delay=HOUR), publish_now)),
            *((decide, State.DEAD) for decide in (partial(reschedule, delay=HOUR), publish_now)),
        ],
    )
    def test_decision_about_a_settled_message_is_too_late_and_returns_its_state(self, decide, state):
        message = in_state(state)

        decision = decide(str(message.id))

        assert (decision, decision.why) == (Decision(Outcome.TOO_LATE, state), f"it is {state.replace('_', ' ')} now")
        assert not decision
        assert state_of(message) == state

    def test_cancel_by_topic_and_biz_id_matches_unpublished_only(self):
        first = in_state(State.PUBLISHED, biz_id="order-1")
        later = [published(biz_id="order-1", delay=HOUR) for _ in range(2)]

        assert cancel(topic=TOPIC, biz_id="order-1") == CANCELLED
        assert [state_of(message) for message in (first, *later)] == [State.PUBLISHED, State.CANCELLED, State.CANCELLED]
        assert cancel(topic=TOPIC, biz_id="order-1") == Decision(Outcome.TOO_LATE, State.CANCELLED)

    @pytest.mark.parametrize(
        ("arguments", "options"),
        [
            ((), {}),
            ((), {"topic": TOPIC}),
            ((), {"biz_id": "order-1"}),
            ((uuid.uuid4(),), {"topic": TOPIC, "biz_id": "order-1"}),
            ((), {"topic": TOPIC, "biz_id": "order\0"}),
            ((), {"topic": "\ud800", "biz_id": "order-1"}),
            (("order-1",), {}),
            ((17,), {}),
        ],
    )
    @pytest.mark.parametrize("decide", [cancel, restore])
    def test_decision_without_a_valid_selection_is_refused(self, decide, arguments, options):
        with pytest.raises(UnknownMessage):
            decide(*arguments, **options)


class TestUnknownMessages:
    @pytest.mark.parametrize("decide", [cancel, partial(reschedule, delay=HOUR), publish_now, restore])
    @pytest.mark.parametrize(
        "selection",
        [{"message_id": uuid.uuid4()}, {"topic": TOPIC, "biz_id": "unknown"}, {"topic": "unknown", "biz_id": "order-1"}],
    )
    def test_decision_about_an_unknown_message_is_not_found(self, decide, selection):
        message = published(biz_id="order-1", delay=HOUR)

        decision = decide(**selection)

        assert decision == NOT_FOUND
        assert not decision
        assert (decision.outcome, decision.state) == ("not_found", "")
        assert state_of(message) == State.SCHEDULED

    def test_message_of_a_rolled_back_transaction_is_not_found(self):
        with transaction.atomic():
            [message] = publish_many([Draft(TOPIC, {}, delay=HOUR)])
            assert publish_now(message.id)
            transaction.set_rollback(True)

        assert cancel(message.id) == NOT_FOUND


# On SQLite the only writer waits for the transaction before it: there are no row locks and no shard locks.
def test_too_late_means_that_none_of_several_messages_was_changed(monkeypatch):
    monkeypatch.setattr("outbox.store.decision_rows.OPERATORS_WAIT", timedelta(milliseconds=50))
    free, locked = (published(biz_id="order-1", delay=HOUR) for _ in range(2))
    with transaction.atomic():
        OutboxMessage.objects.select_for_update().get(pk=locked.position)
        decisions = at_once([lambda: cancel(topic=TOPIC, biz_id="order-1")])

    assert decisions == [Decision(Outcome.TOO_LATE, State.SCHEDULED)]
    assert [state_of(message) for message in (free, locked)] == [State.SCHEDULED, State.SCHEDULED]
    assert cancel(topic=TOPIC, biz_id="order-1")


# As above, PostgreSQL only.
def test_decision_that_is_too_late_does_not_search_history_by_position():
    """History has an index for the names of its published messages, but none for their positions."""
    message = in_state(State.PUBLISHED)
    with CaptureQueriesContext(connection) as queries:
        assert not cancel(message.id)

    by_position = [query["sql"] for query in queries if '"id" IN' in query["sql"]]
    assert by_position
    assert all('"day" IN (0)' in sql for sql in by_position)


# As above, PostgreSQL only.
def test_cancel_in_an_older_snapshot_than_the_state_of_the_message_is_a_serialization_failure():
    message = published(delay=HOUR)
    with transaction.atomic():
        executed("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert state_of(message) == State.SCHEDULED
        at_once([lambda: publish_now(message.id)])
        with pytest.raises(OperationalError, match="could not serialize"):
            cancel(message.id)

    assert state_of(message) == State.READY


@every_database
class TestReschedule:
    @pytest.mark.parametrize("state", OPEN)
    def test_reschedule_sets_the_new_time_and_zero_attempts(self, state):
        message = in_state(state)
        set_columns(message, attempts=3)

        assert reschedule(message.id, delay=HOUR) == Decision(Outcome.RESCHEDULED, State.SCHEDULED)

        row = row_of(message)
        assert (row.state, row.attempts) == (State.SCHEDULED, 0)
        assert row.deliver_at == row.available_at
        assert is_about(row.available_at, timezone.now() + HOUR)

    def test_reschedule_by_topic_and_biz_id_accepts_an_instant_or_a_delay_level_and_leaves_other_messages(self):
        message, tomorrow = published(biz_id="order-1", delay=HOUR), timezone.now().replace(microsecond=0) + timedelta(days=1)
        others = [published(biz_id="order-2", delay=HOUR), published(topic="other", biz_id="order-1", delay=HOUR)]

        assert reschedule(topic=TOPIC, biz_id="order-1", deliver_at=tomorrow).outcome == "rescheduled"
        assert row_of(message).available_at == tomorrow
        assert reschedule(message.id, delay="30m")
        for options in ({}, {"delay": HOUR, "deliver_at": tomorrow}, {"delay": -HOUR}, {"delay": "7y"}):
            with pytest.raises(InvalidMessage):
                reschedule(message.id, **options)
        assert is_about(row_of(message).available_at, timezone.now() + timedelta(minutes=30))
        assert all(is_about(row_of(other).available_at, timezone.now() + HOUR) for other in others)

    @pytest.mark.parametrize("delay", [None, timedelta(days=1)])
    def test_reschedule_keeps_the_time_between_delivery_and_expiry(self, delay):
        message = published(delay=delay, expires_in=timedelta(minutes=10))

        assert reschedule(message.id, delay=HOUR)

        row = row_of(message)
        assert row.expires_at - row.available_at == timedelta(minutes=10)


@every_database
@pytest.mark.parametrize("state", OPEN)
def test_publish_now_makes_a_message_ready_and_keeps_its_lifetime(state):
    message = in_state(state, delay=timedelta(days=30), expires_in=HOUR)

    assert publish_now(message.id) == Decision(Outcome.RESCHEDULED, State.READY)

    row = row_of(message)
    assert row.state == State.READY
    assert row.deliver_at == row.available_at, "or its consumer would take it for a month old"
    assert row.expires_at - row.available_at == HOUR
    with transaction.atomic():
        assert [one.position for one in in_hand()] == [message.position]


def test_delay_and_expiry_as_text_are_stored_as_instants():
    with transaction.atomic():
        publish_many([Draft(TOPIC, {}, delay="7d"), Draft(TOPIC, {}, delay="90s", expires_in="2m")])
    message = published(delay="1h")
    assert reschedule(message.id, delay="2h")

    rows = OutboxMessage.objects.order_by("pk")
    assert {row.state for row in rows} == {State.SCHEDULED}
    delays = [row.available_at - row.created_at for row in rows]
    assert [delay - delay % timedelta(seconds=1) for delay in delays] == [timedelta(days=7), timedelta(seconds=90), 2 * HOUR]
    assert rows[1].expires_at - rows[1].available_at == timedelta(minutes=2)


@every_database
def test_async_decisions_are_rolled_back_with_the_transaction_around_them():
    message = published(delay=HOUR)
    with transaction.atomic():
        assert async_to_sync(areschedule)(message.id, delay=2 * HOUR)
        assert async_to_sync(apublish_now)(message.id)
        assert async_to_sync(acancel)(topic=TOPIC, biz_id=message.biz_id) == CANCELLED
        transaction.set_rollback(True)

    assert is_about(row_of(message).available_at, timezone.now() + HOUR)


@pytest.mark.long
@every_database
@pytest.mark.timeout(600)  # of CANCELS=10000
def test_message_cancelled_at_its_due_time_is_either_cancelled_or_published(peer):
    # SQLite's waiting writers do not queue: six of them take minutes for a thousand on a machine with other work.
    count = int(os.environ.get("CANCELS", "1000" if connection.vendor == "postgresql" else "200"))
    with transaction.atomic():
        at = timezone.now() + timedelta(seconds=2)
        messages = publish_many(Draft(TOPIC, {}, deliver_at=at) for _ in range(count))
    order = Random(1).sample(messages, count)
    answers = {}

    def cancel_it(message):
        # For the same reason, one of them may wait in vain for as long as its timeout.
        while True:
            try:
                return cancel(message.id)
            except OperationalError as error:
                if "database is locked" not in str(error):
                    raise

    def cancel_some(part):
        mine = order[part::4]
        for number, message in enumerate(mine):
            if number == len(mine) // 4:
                wait_until(lambda: timezone.now() > at)
            if number == len(mine) * 3 // 4:
                wait_until(lambda: peer.published)
            answers[str(message.id)] = cancel_it(message)

    with relaying(peer.url, relays=2, timed=True), in_threads(*(partial(cancel_some, part) for part in range(4))):
        pass
    drained(peer.url)

    arrived = Counter(ids(peer.published))
    cancelled = {name for name, answer in answers.items() if answer}
    assert cancelled
    assert arrived
    assert not cancelled & arrived.keys()
    assert cancelled | arrived.keys() == {str(message.id) for message in messages}
    assert set(arrived.values()) == {1}
    # PostgreSQL waits for the relay that has it in hand; SQLite's only writer cannot.
    expected = {State.CANCELLED, State.PUBLISHED} | ({State.READY} if connection.vendor == "sqlite" else set())
    assert {answer.state for answer in answers.values()} <= expected

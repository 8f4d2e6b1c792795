"""A message that becomes ready again keeps its priority, and no message is published after it has expired."""

import logging
from datetime import timedelta
from functools import partial
from uuid import UUID

import pytest

from exactly_once.process.clock import monotonic
from exactly_once.sql.now import DatabaseTime
from exactly_once.transport.interface import PublishOutcome
from outbox import cancel, publish_now, reschedule, signals
from outbox.models import OutboxMessage
from outbox.relay import passes
from outbox.states import RESTORE, State
from outbox.store import claiming, decision_rows, settling
from tests.support.relaying import drained, ids, one_pass, published, row_of, set_columns, state_of
from tests.support.signals import listening

pytestmark = [pytest.mark.every_database, pytest.mark.django_db]

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def expired():
    """The message ids that the signal `message_expired` has reported."""
    reported = []

    def receive(message_id, **extra):
        reported.append(UUID(message_id))

    with listening(signals.message_expired, receive):
        yield reported


def came_due(message):
    set_columns(message, deliver_at=DatabaseTime(), available_at=DatabaseTime())
    assert settling.make_scheduled_ready("default", 10) + settling.make_retrying_ready("default", 10) == 1


def failed(message, retry_after, outcome=PublishOutcome.NACKED):
    failure = settling.Failure(positions=[message.position], error="no", error_class=outcome.value, retry_after=retry_after)
    settling.settle("default", settling.Settlement(failed=[failure]))


def retried(message, outcome=PublishOutcome.NACKED):
    failed(message, HOUR, outcome)
    came_due(message)


def restored_when_dead(message):
    failed(message, None)
    assert decision_rows.decide("default", RESTORE, [message.position])


def restored(message):
    assert cancel(message.id)
    assert decision_rows.decide("default", RESTORE, [message.position])


def sent_now(message):
    assert publish_now(message.id)


WAYS = {
    "from the start": (None, lambda message: None),
    "after its delay": (HOUR, came_due),
    "after a retry": (None, retried),
    "restored when it was dead": (None, restored_when_dead),
    "restored when it was cancelled": (None, restored),
    "rescheduled": (None, lambda message: reschedule(message.id, delay=HOUR) and came_due(message)),
    "sent now instead of later": (HOUR, sent_now),
}


@pytest.mark.parametrize("way", WAYS)
def test_priority_is_kept_on_every_way_back_to_ready(peer, transport, way):
    delay, go = WAYS[way]
    published(biz_id="plain")
    published(biz_id="lower", priority=4)
    urgent = published(biz_id="urgent", priority=5, delay=delay)
    published(biz_id="plain too")

    go(urgent)
    one_pass(transport)

    sent = [delivery.headers["cloudEvents:bizid"] for delivery in peer.published]
    assert sent == ["urgent", "lower", "plain", "plain too"]
    assert row_of(urgent).priority == 5


@pytest.mark.parametrize(("outcome", "order"), [("NACKED", ["first", "second"]), ("REFUSED", ["second", "first"])])
def test_retried_message_has_its_place_again_unless_the_broker_may_close_the_connection(peer, transport, outcome, order):
    first, _ = published(biz_id="first"), published(biz_id="second")

    retried(first, PublishOutcome[outcome])
    one_pass(transport)

    assert [delivery.headers["cloudEvents:bizid"] for delivery in peer.published] == order
    assert state_of(first) == State.PUBLISHED


class TestExpiredMessage:
    """An expired message is not sent; its state, the signal and the log report it."""

    @pytest.fixture(autouse=True)
    def _expiry_is_reported(self, expired, caplog):
        """In each test, for the message with the biz-id "expiring"."""
        caplog.set_level(logging.WARNING)
        yield
        row = OutboxMessage.objects.get(biz_id="expiring")
        assert row.state == State.EXPIRED
        assert row.settled_at is not None
        assert expired == [row.message_id]
        logged = [record.getMessage() for record in caplog.get_records("call")]
        assert f"relay: 1 messages of {row.topic} have expired before they could be published." in logged

    def test_expired_message_is_not_sent_when_it_becomes_due_late(self, peer):
        expiring, alive = (published(biz_id=biz_id, delay=HOUR, expires_in=HOUR) for biz_id in ("expiring", "alive"))
        set_columns(expiring, available_at=DatabaseTime(-2 * HOUR), expires_at=DatabaseTime(-HOUR))
        set_columns(alive, available_at=DatabaseTime(-HOUR / 2), expires_at=DatabaseTime(HOUR / 2))

        drained(peer.url)

        assert ids(peer.published) == [str(alive.id)]

    def test_message_that_expires_during_a_broker_outage_is_not_sent_again(self, peer, transport):
        expiring = published(biz_id="expiring", expires_in=HOUR)
        peer.script = lambda message: [peer.drop]
        one_pass(transport)
        assert state_of(expiring) == State.READY
        peer.script = None
        peer.published.clear()
        set_columns(expiring, expires_at=DatabaseTime())

        drained(peer.url)

        assert peer.published == []

    def test_message_that_expires_while_its_predecessor_awaits_a_confirm_is_not_sent(self, peer, transport, monkeypatch):
        _, expiring, last = (
            published(biz_id=biz_id, key="k", expires_in=20 * MINUTE if biz_id == "expiring" else None)
            for biz_id in ("head", "expiring", "last")
        )
        elapsed = [0.0]
        for module in (passes, claiming):
            monkeypatch.setattr(module, "monotonic", lambda: monotonic() + elapsed[0])
        peer.script = lambda message: [partial(elapsed.__setitem__, 0, HOUR.total_seconds()), partial(peer.ack, message)]

        one_pass(transport, BATCH_DEADLINE=3 * HOUR, WATCHDOG=4 * HOUR)

        assert [delivery.headers["cloudEvents:bizid"] for delivery in peer.published] == ["head"]
        assert (state_of(expiring), state_of(last)) == (State.READY, State.READY), (
            "only the database's clock decides that it has expired"
        )
        set_columns(expiring, expires_at=DatabaseTime())
        one_pass(transport)
        assert [delivery.headers["cloudEvents:bizid"] for delivery in peer.published] == ["head", "last"]

    def test_message_that_expires_between_attempts_is_not_sent_and_releases_its_key(self, peer, transport):
        expiring = published(biz_id="expiring", key="k", expires_in=20 * MINUTE)
        last = published(biz_id="last", key="k")
        peer.script = lambda message: [partial(peer.nack, message)]
        one_pass(transport, BACKOFF=(2 * HOUR, 2 * HOUR))
        row = row_of(expiring)
        assert (row.state, row.available_at) == (State.RETRYING, row.expires_at)
        peer.script = None
        peer.published.clear()
        set_columns(expiring, available_at=DatabaseTime(), expires_at=DatabaseTime())

        drained(peer.url)

        assert ids(peer.published) == [str(last.id)]

"""Delay, order, priority, expiry, preparing and the transaction, on the same messages."""

from contextlib import suppress
from datetime import timedelta

import pytest
from django.db import transaction

from outbox import Answer, cancel, checker, prepare, publish, reschedule, restore
from outbox.callbacks import checkers
from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.relaying import TOPIC, drained, ids, published, row_of, set_columns, state_of

pytestmark = [pytest.mark.every_database, pytest.mark.django_db]

HOUR = timedelta(hours=1)
A_STALL = timedelta(minutes=3)
IN_TIME = {"delay": 2 * HOUR, "expires_in": HOUR}


@pytest.fixture
def _checked():
    checker(TOPIC)(lambda message: Answer.UNKNOWN)
    yield
    checkers.remove(TOPIC)


def age_every_message(duration):
    """Move every instant of every message into the past by `duration`."""
    for row in OutboxMessage.objects.all():
        names = ("created_at", "deliver_at", "available_at", "expires_at")
        instants = {name: getattr(row, name) for name in names}
        row.id = row.message_id
        set_columns(row, **{name: instant - duration for name, instant in instants.items() if instant})


def newly_sent(peer):
    """The ids of the messages published since the last call."""
    found = ids(peer.published)
    peer.published.clear()
    return found


def test_messages_of_one_key_with_delay_and_expiry_are_cancelled_rescheduled_and_restored(peer):
    with transaction.atomic():
        head, rescheduled, third, expired, last = (publish(TOPIC, {}, key="k", strict_order=True, **IN_TIME) for _ in range(5))
        with suppress(ZeroDivisionError), transaction.atomic():
            publish(TOPIC, {}, key="k", **IN_TIME)
            assert cancel(third.id)
            raise ZeroDivisionError
    drained(peer.url)
    assert newly_sent(peer) == []

    with transaction.atomic():
        assert cancel(head.id)
        assert reschedule(rescheduled.id, delay=4 * HOUR)
    set_columns(expired, expires_at=row_of(expired).deliver_at)
    age_every_message(2.5 * HOUR)
    drained(peer.url)

    assert newly_sent(peer) == ids([third, last])
    assert [state_of(message) for message in (head, rescheduled, expired)] == [State.CANCELLED, State.SCHEDULED, State.EXPIRED]
    assert restore(head.id)
    age_every_message(1.5 * HOUR)
    drained(peer.url)
    assert newly_sent(peer) == ids([rescheduled])
    assert state_of(head) == State.EXPIRED, "restored while overdue, it expires an hour after its restore"


@pytest.mark.usefixtures("_checked")
def test_prepared_messages_with_priority_delay_and_expiry_are_sent_by_priority(peer):
    published(biz_id="plain", delay=2 * HOUR)
    lower, higher, expired, undone, open_ = (
        prepare(TOPIC, {}, biz_id=str(priority), priority=priority, **IN_TIME) for priority in (4, 5, 6, 7, 8)
    )
    for half in (lower, higher, expired):
        half.commit()
    undone.rollback()
    assert [state_of(half) for half in (lower, higher)] == [State.SCHEDULED, State.SCHEDULED]
    drained(peer.url)
    assert newly_sent(peer) == []

    set_columns(expired, expires_at=row_of(expired).deliver_at)
    age_every_message(2.5 * HOUR)
    drained(peer.url)

    assert [delivery.headers["cloudEvents:bizid"] for delivery in peer.published] == ["5", "4", "plain"]
    left = [delivery.properties.get("expiration") for delivery in peer.published]
    assert left[2] is None
    for milliseconds in left[:2]:
        assert timedelta() <= HOUR / 2 - timedelta(milliseconds=int(milliseconds)) < A_STALL
    assert [state_of(half) for half in (expired, undone, open_)] == [State.EXPIRED, State.ROLLED_BACK, State.PREPARED]


@pytest.mark.usefixtures("_checked")
def test_prepared_message_with_a_key_and_a_delay_takes_its_place_in_the_order(peer):
    half = prepare(TOPIC, {}, key="k", **IN_TIME)
    later = published(key="k", delay=2 * HOUR)
    half.commit()
    age_every_message(2.5 * HOUR)

    drained(peer.url)

    assert newly_sent(peer) == ids([half, later])

"""Unique messages in transactions that keep one snapshot: what others have committed since is invisible, and still counts."""

from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import transaction

from outbox import cancel, publish
from outbox.models import OutboxMessage
from outbox.states import RESTORE, State
from outbox.store import decision_rows
from tests.support.relaying import TOPIC, in_state, in_threads, published, state_of
from tests.support.sql import executed

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])]


@contextmanager
def a_snapshot(level):
    with transaction.atomic():
        executed(f"SET TRANSACTION ISOLATION LEVEL {level}")
        OutboxMessage.objects.count()
        yield


def test_message_cancelled_since_is_replaced_once(level):
    first = published(biz_id="order-1", unique=True, delay=timedelta(hours=1))
    with a_snapshot(level):
        with in_threads(lambda: cancel(first.id)):
            pass
        assert state_of(first) == State.SCHEDULED
        second, found = (publish(TOPIC, {}, biz_id="order-1", unique=True) for _ in range(2))

    assert second.created
    assert (found.id, found.created, found.state) == (second.id, False, State.READY)


@pytest.mark.long
def test_restore_leaves_the_message_that_was_replaced_since(level):
    messages = [in_state(State.CANCELLED, biz_id=f"order-{n}", unique=True) for n in range(8)]
    with a_snapshot(level):
        with in_threads(lambda: published(biz_id="order-3", unique=True)):
            pass
        decided = decision_rows.decide("default", RESTORE, [message.position for message in messages])

    assert (len(decided.became), len(decided.left)) == (7, 1)
    assert [message.biz_id for message in messages if state_of(message) == State.CANCELLED] == ["order-3"]

"""Many days of history: a statement about one message of the outbox does not lock the partitions of all days."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import transaction

from exactly_once.sql.days import day_of
from exactly_once.sql.now import DatabaseTime
from outbox import cancel, publish, restore
from outbox.models import OutboxMessage
from outbox.states import State
from outbox.store.history import HISTORY
from outbox.store.selecting import identified
from tests.support.sql import fetched

pytestmark = [pytest.mark.django_db(transaction=True)]

DAYS = 60
FEW_PARTITIONS = 8


@pytest.fixture(autouse=True, scope="module")
def _made(django_db_setup, django_db_blocker):
    """Partitions of many days."""
    with django_db_blocker.unblock():
        today, days = day_of("default"), HISTORY.days
        before = days.existing("default")
        made = [day for day in range(today - DAYS, today + 2) if day not in before]
        for day in made:
            days.make("default", day)
        yield
        for day in made:
            days.drop("default", day)


def locked_by(action):
    """How many partitions of history `action` has locked, and what it returned."""
    with transaction.atomic():
        found = action()
        return fetched(
            "SELECT count(*) FROM pg_locks l JOIN pg_inherits i ON i.inhrelid = l.relation "
            f"WHERE l.pid = pg_backend_pid() AND i.inhparent = '{HISTORY.days.history}'::regclass"
        ), found


@pytest.fixture
def cancelled():
    """A message that was cancelled 40 days ago."""
    with transaction.atomic():
        message = publish("shop.order.placed", {"order_id": 1})
        cancel(message.id)
    ago = timedelta(days=40)
    OutboxMessage.objects.update(settled_at=DatabaseTime(-ago), day=day_of("default", ago))
    return message


def test_restoring_a_message_by_its_id_locks_a_few_partitions(cancelled):
    locked, _ = locked_by(lambda: restore(cancelled.id))

    assert OutboxMessage.objects.get().state == State.READY
    assert locked <= FEW_PARTITIONS


def test_message_is_found_by_its_id_without_locking_all_days(cancelled):
    locked, found = locked_by(lambda: identified("default", [cancelled.id]).get())

    assert found.message_id == cancelled.id
    assert locked <= FEW_PARTITIONS

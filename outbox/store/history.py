"""The history of the outbox. A message with a pending callback is not deleted, and its day is not dropped."""

from datetime import UTC, datetime, time
from functools import partial

from django.db import connections
from django.db.models import Exists, OuterRef, Q

from exactly_once.sql.connections import fetch
from exactly_once.sql.days import date_of
from exactly_once.upkeep.history import History
from outbox.models import OutboxMessage, PendingCallback
from outbox.store.dialect import TABLE

_PENDING = PendingCallback._meta.db_table
_IS_PENDING = Q(Exists(PendingCallback.objects.filter(message=OuterRef("message_id"))))


def _has_pending(alias: str, day: int) -> bool:
    # Not by the name of the day's partition, which another process may have dropped.
    pending = f"SELECT 1 FROM {_PENDING} JOIN {TABLE} USING (message_id) WHERE day = %s LIMIT 1"
    return bool(fetch(connections[alias], pending, [day]))


HISTORY = History(
    model=OutboxMessage,
    by="message_id",
    instants=("settled_at",),
    stays=lambda _: _IS_PENDING,
    keeps=lambda alias, day: partial(_has_pending, alias, day),
)


def days_with_pending_callbacks(alias: str, last: int) -> list[int]:
    """The days up to `last` of which a message has a pending callback. Without such a callback, history is not read."""
    end = datetime.combine(date_of(last + 1), time(), UTC)
    if not PendingCallback.objects.using(alias).filter(settled_at__lt=end).exists():
        return []
    pending = HISTORY.rows(alias).filter(_IS_PENDING, day__lte=last)
    return sorted(set(pending.values_list("day", flat=True)))

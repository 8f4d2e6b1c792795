"""The queries of the inbox's alert conditions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import Count

from exactly_once.sql.now import DatabaseTime
from inbox.models import DUE, InboxMessage, PausedHandler, State
from inbox.store import heartbeats
from inbox.store.due import stored_handlers


def has_consumers(alias: str) -> bool:
    """Is a process known that runs handlers here, also a silent one, or one that has stopped within the last hour?"""
    return bool(heartbeats.consumers.known(alias).exists())


def due_handlers(alias: str) -> set[str]:
    """The handlers with stored messages."""
    return set(stored_handlers(alias))


def paused(alias: str) -> dict[str, Any]:
    """The paused handlers by name."""
    return {row.handler: row for row in PausedHandler.objects.using(alias).annotate(database_now=DatabaseTime())}


def is_late(alias: str, handler: str, lag: timedelta) -> bool:
    """Has a stored message of this handler been due for longer than `lag`?"""
    late = InboxMessage.objects.using(alias).filter(handler=handler, state__in=DUE, next_attempt_at__lt=DatabaseTime(-lag))
    return bool(late.exists())


def newly_conflicting(alias: str, within: timedelta) -> dict[str, int]:
    """By handler, how many messages have got a duplicate with other content within this time that no operator has run."""
    rows = InboxMessage.objects.using(alias).filter(conflicts__gt=0, conflicting_attributes__isnull=False)
    recent = rows.filter(conflicting_at__gte=DatabaseTime(-within))
    return dict(recent.order_by("handler").values_list("handler").annotate(Count("pk")))


def newly_dead(alias: str, within: timedelta) -> int:
    """How many dead messages became so within this time."""
    return InboxMessage.objects.using(alias).filter(state=State.DEAD, settled_at__gte=DatabaseTime(-within)).count()

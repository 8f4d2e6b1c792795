"""The handlers that operators have paused: one row for each, which every process reads (`inbox.runner`, `store.due`)."""

from __future__ import annotations

from typing import Any

from django.db.models import Count, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce

from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.text import ERROR_LENGTH, NAME_LENGTH, printable
from inbox.models import DUE, InboxMessage, PausedHandler


def paused_names(alias: str) -> frozenset[str]:
    return frozenset(PausedHandler.objects.using(alias).values_list("handler", flat=True))


def paused_handlers(alias: str) -> QuerySet[PausedHandler]:
    """The paused handlers, annotated with the number of their stored `messages` that are not settled."""
    of_it = InboxMessage.objects.filter(handler=OuterRef("handler"), state__in=DUE).order_by()
    counted = Subquery(of_it.values("handler").annotate(messages=Count("pk")).values("messages"))
    rows = PausedHandler.objects.using(alias).order_by("handler")
    return rows.annotate(messages=Coalesce(counted, 0), database_now=DatabaseTime())


def pause(alias: str, handler: str, by: str, reason: str) -> bool:
    """Pause a handler; False: it was paused already, and keeps its time, with the new reason."""
    given = {"paused_by": by[:NAME_LENGTH], "reason": printable(reason, ERROR_LENGTH)}
    _, created = PausedHandler.objects.using(alias).update_or_create(
        handler=handler, defaults=given, create_defaults={**given, "handler": handler, "paused_at": DatabaseTime()}
    )
    return bool(created)


def resume(alias: str, handler: str) -> bool:
    """Resume a handler. False: it is not paused."""
    return bool(PausedHandler.objects.using(alias).filter(handler=handler).delete()[0])


def is_known(alias: str, handler: str) -> bool:
    """Has it stored messages, or is it paused?"""
    stored: Any = InboxMessage.objects.using(alias).filter(handler=handler)
    return bool(stored.exists() or PausedHandler.objects.using(alias).filter(handler=handler).exists())

"""Pausing a handler: its messages stay where they are, in order, and no process runs them until it is resumed."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Any

from django.db import router, transaction
from django.db.models import Count, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce

from exactly_once.process.logs import escaping_logger
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.identity import process_name
from exactly_once.wire.text import ERROR_LENGTH, NAME_LENGTH, fit, printable
from inbox.errors import UnknownHandler
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, PausedHandler
from inbox.states import DUE

logger = escaping_logger(__name__)

_PAUSED = "inbox: handler %s paused by %s%s; its messages stay in the queue or stored, and no process runs them"
_RESUMED = "inbox: handler %s resumed by %s; consumers run its messages again, the oldest first"


class HandlerState(StrEnum):
    """How `pause` and `resume` found a handler."""

    ACTIVE = "active"
    """Not paused."""
    PAUSED = "paused"
    """Paused by a person or by code."""


def pause(handler: str, *, reason: str = "", by: str = "", using: str | None = None) -> HandlerState:
    """Have no process run messages of `handler` until `resume()`; returns how it was found.

    In the transaction that is open on `using`, or else in one of its own. After that has committed, a stored message is not
    run, and each consumer ends its subscription to the handler's queue within two seconds. A run that has begun is finished.

    Args:
        handler: its exact name.
        reason: for people; shown with the handler.
        by: who; default: this process.
        using: the database; default: the handler's own.

    Raises:
        UnknownHandler: neither this project nor the table of messages knows it, or it works on another database.
    """
    alias = alias_of(handler, using)
    by = by or process_name()
    with transaction.atomic(using=alias):
        found = store_pause(alias, handler, by, reason)
        _after_commit(alias, partial(logger.warning, _PAUSED, handler, by, f": {reason}" if reason else ""))
    return found


def resume(handler: str, *, by: str = "", using: str | None = None) -> HandlerState:
    """Have the messages of `handler` run again; returns how it was found.

    In the transaction that is open on `using`, or else in one of its own. Consumers see it within two seconds.

    Args:
        by: who; default: this process.
        using: the database; default: the handler's own.

    Raises:
        UnknownHandler: neither this project nor the table of messages knows it, or it works on another database.
    """
    alias = alias_of(handler, using)
    with transaction.atomic(using=alias):
        if not PausedHandler.objects.using(alias).filter(handler=handler).delete()[0]:
            return HandlerState.ACTIVE
        _after_commit(alias, partial(logger.warning, _RESUMED, handler, by or process_name()))
    return HandlerState.PAUSED


def _after_commit(alias: str, report: partial[None]) -> None:
    transaction.on_commit(report, using=alias, robust=True)


def alias_of(name: str, using: str | None = None) -> str:
    """The database in which a handler is paused. Consumers read the pauses of its own database only.

    Raises:
        UnknownHandler: neither this project nor the table of messages knows it, or it works on another database.
    """
    registered = registry.get(name)
    alias = using or (registered.using if registered else router.db_for_write(InboxMessage))
    if registered is None and not _is_known(alias, name):
        known = ", ".join(sorted(handler.name for handler in registry.all())) or "none"
        raise UnknownHandler(f"No handler is called {name!r}. Known handlers: {known}.")
    if registered and alias != registered.using and not PausedHandler.objects.using(alias).filter(handler=name).exists():
        raise UnknownHandler(
            f"The handler {name} works on the database {registered.using!r}, not on {alias!r}. Pause and resume it there: "
            f"--database {registered.using}."
        )
    return alias


def paused_handlers(alias: str) -> QuerySet[PausedHandler]:
    """The paused handlers, annotated with the number of their stored `messages` that are not settled."""
    stored = InboxMessage.objects.filter(handler=OuterRef("handler"), state__in=DUE).order_by()
    counted = Subquery(stored.values("handler").annotate(messages=Count("pk")).values("messages"))
    rows = PausedHandler.objects.using(alias).order_by("handler")
    return rows.annotate(messages=Coalesce(counted, 0), database_now=DatabaseTime())


def store_pause(alias: str, handler: str, by: str, reason: str) -> HandlerState:
    """Pause a handler, known or not. One that is paused keeps its time, with the new reason."""
    given = {"paused_by": by[:NAME_LENGTH], "reason": printable(reason, ERROR_LENGTH)}
    _, created = PausedHandler.objects.using(alias).update_or_create(
        handler=handler, defaults=given, create_defaults={**given, "handler": handler, "paused_at": DatabaseTime()}
    )
    return HandlerState.ACTIVE if created else HandlerState.PAUSED


def _is_known(alias: str, handler: str) -> bool:
    """Has it stored messages, or is it paused?"""
    handler = fit(str(handler))
    stored: Any = InboxMessage.objects.using(alias).filter(handler=handler)
    return bool(stored.exists() or PausedHandler.objects.using(alias).filter(handler=handler).exists())

"""The starts of new handlers: which of them wait for their past, and how far the outbox has handed it over."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from django.db import connections, transaction
from django.db.models import QuerySet

from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.now import DatabaseTime
from inbox.conf import outbox_keeps_history
from inbox.models import HandlerStart, Receipt


def waiting_among(alias: str, wanted: Mapping[str, datetime | None]) -> frozenset[str]:
    """The names of those that wait for their past. A handler that is seen for the first time is recorded.

    It waits from then on if the outbox keeps history and it has no receipts here. With receipts it is not new, and without
    history it has no past.

    Args:
        wanted: by its name, since when a handler wants what was published; None for all there is.
    """
    known = _known(alias, wanted)
    if missing := wanted.keys() - known.keys():
        with transaction.atomic(using=alias):
            for handler in sorted(missing):
                _record(alias, handler, wanted[handler])
        known = _known(alias, wanted)
    return frozenset(handler for handler in wanted if known.get(handler) is None)


def _known(alias: str, handlers: Collection[str]) -> dict[str, datetime | None]:
    """When the starts of the handlers that were seen before were complete."""
    return dict(HandlerStart.objects.using(alias).filter(handler__in=handlers).values_list("handler", "complete_at"))


def _record(alias: str, handler: str, since: datetime | None) -> None:
    waits = outbox_keeps_history() and not Receipt.objects.using(alias).filter(handler=handler).exists()
    start = HandlerStart(
        handler=handler,
        since=since,
        read_from=since,
        asked_at=DatabaseTime(),
        complete_at=None if waits else DatabaseTime(),
    )
    HandlerStart.objects.using(alias).bulk_create([start], ignore_conflicts=True)


def waiting(alias: str) -> list[str]:
    """The names of all handlers that wait for their past."""
    return list(incomplete(alias).values_list("handler", flat=True))


def incomplete(alias: str) -> QuerySet[HandlerStart]:
    """The starts of all handlers that wait for their past."""
    return HandlerStart.objects.using(alias).filter(complete_at=None).order_by("pk")


def without_relay(alias: str) -> frozenset[str]:
    """The names of those that no relay has begun with: none that runs knows them, or none runs."""
    return frozenset(incomplete(alias).filter(round_at=None).values_list("handler", flat=True))


def lock(alias: str, handler: str) -> HandlerStart | None:
    """Lock the start until the open transaction ends; None if another process has it, or it is complete."""
    rows = HandlerStart.objects.using(alias).filter(handler=handler, complete_at=None)
    if not is_postgresql(connections[alias]):
        rows.update(handler=handler)  # takes the write lock, which lasts until the transaction ends
    return rows.select_for_update(skip_locked=is_postgresql(connections[alias])).first()


def update(alias: str, start: HandlerStart, **columns: Any) -> None:
    HandlerStart.objects.using(alias).filter(pk=start.pk).update(**columns)

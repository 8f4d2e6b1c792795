"""The starts of new handlers: which of them wait for their past, and how far the outbox has handed it over."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db import connections, transaction
from django.db.models import QuerySet

from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.now import DatabaseTime
from inbox.models import HandlerStart, Receipt


class Wanted(NamedTuple):
    """A handler that wants what was published since an instant; None for all there is."""

    handler: str
    since: datetime | None


def waiting_among(alias: str, wanted: Sequence[Wanted], *, has_past: bool) -> frozenset[str]:
    """The names of those that wait for their past. A handler that is seen for the first time is recorded.

    It waits from then on if there is a past and it has no receipts here. With receipts it is not new.
    """
    known = _known(alias, wanted)
    if missing := [one for one in wanted if one.handler not in known]:
        with transaction.atomic(using=alias):
            for one in missing:
                _record(alias, one, has_past=has_past)
        known = _known(alias, wanted)
    return frozenset(one.handler for one in wanted if known.get(one.handler) is None)


def _known(alias: str, wanted: Sequence[Wanted]) -> dict[str, datetime | None]:
    """When the starts of the handlers that were seen before were complete."""
    rows = HandlerStart.objects.using(alias).filter(handler__in=[one.handler for one in wanted])
    return dict(rows.values_list("handler", "complete_at"))


def _record(alias: str, wanted: Wanted, *, has_past: bool) -> None:
    waits = has_past and not Receipt.objects.using(alias).filter(handler=wanted.handler).exists()
    start = HandlerStart(
        handler=wanted.handler,
        since=wanted.since,
        read_from=wanted.since,
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

"""What the tables say about handlers: which processes run them, whether they wait for their past, how long their rows are kept.

Several services may share a database. What one keeps for a year, another must not delete after a day, however long the first
has been stopped. So each process records the periods of its handlers, and housekeeping deletes by these records. Of several
periods of one handler the longest counts, for as long as rows may exist that were stored under it. Rows of a handler without a
record are not deleted. See decisions/0049-periods-of-handlers.md.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import connections, transaction
from django.db.models import QuerySet

from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.heartbeat_table import HeartbeatTable
from inbox.conf import inbox_options, outbox_keeps_history
from inbox.models import HandlerStart, KeptHandler, Receipt

CONFIRMED_EVERY = timedelta(hours=1)
_MARGIN = timedelta(days=1)
"""A process may store messages for hours after it was last able to confirm its period."""

consumers = HeartbeatTable("inbox")
"""The heartbeats of the processes that run handlers."""


def running_handlers(alias: str) -> set[str]:
    """The names of the handlers on a database that a process runs, according to the heartbeats."""
    running = consumers.rows(alias).filter(silent=False)
    return {name for names in running.values_list("facts__handlers", flat=True) for name in names}


def waiting_among(alias: str, wanted: Mapping[str, datetime | None]) -> frozenset[str]:
    """The names of those that wait for their past. A handler that is seen for the first time is recorded.

    It waits from then on if the outbox keeps history and it has no receipts here. With receipts it is not new, and without
    history it has no past.

    Args:
        wanted: by its name, since when a handler wants what was published; None for all there is.
    """
    known = _complete_at(alias, wanted)
    if missing := wanted.keys() - known.keys():
        with transaction.atomic(using=alias):
            for handler in sorted(missing):
                _record_start(alias, handler, wanted[handler])
        known = _complete_at(alias, wanted)
    return frozenset(handler for handler in wanted if known.get(handler) is None)


def _complete_at(alias: str, handlers: Collection[str]) -> dict[str, datetime | None]:
    """When the starts of the handlers that were seen before were complete."""
    return dict(HandlerStart.objects.using(alias).filter(handler__in=handlers).values_list("handler", "complete_at"))


def _record_start(alias: str, handler: str, since: datetime | None) -> None:
    waits = outbox_keeps_history() and not Receipt.objects.using(alias).filter(handler=handler).exists()
    start = HandlerStart(
        handler=handler,
        since=since,
        read_from=since,
        asked_at=DatabaseTime(),
        complete_at=None if waits else DatabaseTime(),
    )
    HandlerStart.objects.using(alias).bulk_create([start], ignore_conflicts=True)


def waiting_handlers(alias: str) -> list[str]:
    """The names of all handlers that wait for their past."""
    return list(incomplete_starts(alias).values_list("handler", flat=True))


def incomplete_starts(alias: str) -> QuerySet[HandlerStart]:
    """The starts of all handlers that wait for their past."""
    return HandlerStart.objects.using(alias).filter(complete_at=None).order_by("pk")


def without_relay(alias: str) -> frozenset[str]:
    """The names of those that no relay has begun with: none that runs knows them, or none runs."""
    return frozenset(incomplete_starts(alias).filter(round_at=None).values_list("handler", flat=True))


def lock_start(alias: str, handler: str) -> HandlerStart | None:
    """Lock the start until the open transaction ends; None if another process has it, or it is complete."""
    rows = HandlerStart.objects.using(alias).filter(handler=handler, complete_at=None)
    if not is_postgresql(connections[alias]):
        rows.update(handler=handler)  # takes the write lock, which lasts until the transaction ends
    return rows.select_for_update(skip_locked=is_postgresql(connections[alias])).first()


def update_start(alias: str, start: HandlerStart, **columns: Any) -> None:
    HandlerStart.objects.using(alias).filter(pk=start.pk).update(**columns)


def record_periods(alias: str, handlers: Iterable[str]) -> None:
    """Record that this service keeps receipts and history of these handlers for its own periods."""
    options, names = inbox_options(), {*handlers}
    periods = {"retention": options.RETENTION, "history": options.keeps}
    rows = KeptHandler.objects.using(alias)
    lately = rows.filter(handler__in=names, **periods, confirmed_at__gte=DatabaseTime(-CONFIRMED_EVERY))
    if missing := sorted(names.difference(lately.values_list("handler", flat=True))):
        rows.bulk_create(
            [KeptHandler(handler=name, **periods, confirmed_at=DatabaseTime()) for name in missing],
            update_conflicts=True,
            unique_fields=["handler", *periods],
            update_fields=["confirmed_at"],
        )


def recorded_periods(alias: str, what: str) -> dict[str, timedelta]:
    """By handler, its `retention` or `history`: the longest period under which a row may have been stored that is not older."""
    found: dict[str, tuple[bool, timedelta]] = {}
    rows = KeptHandler.objects.using(alias).values_list("handler", what, "confirmed_at", DatabaseTime())
    for handler, period, confirmed_at, now in rows:
        candidate = now - confirmed_at <= period + _MARGIN, period
        found[handler] = max(candidate, found.get(handler, candidate))
    return {handler: period for handler, (_, period) in found.items()}


def by_period(kept: dict[str, timedelta]) -> dict[timedelta, list[str]]:
    """The handlers of each period."""
    handlers: dict[timedelta, list[str]] = {}
    for name, period in kept.items():
        handlers.setdefault(period, []).append(name)
    return handlers

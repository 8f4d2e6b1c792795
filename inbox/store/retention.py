"""How long receipts and history are kept: what the services that run a handler have recorded about it.

Several services may share a database. What one keeps for a year, another must not delete after a day, however long the first
has been stopped. So each process records the periods of its handlers, and housekeeping deletes by these records. Of several
periods of one handler the longest counts, for as long as rows may exist that were stored under it. Rows of a handler without a
record are not deleted. See decisions/0049-periods-of-handlers.md.
"""

from collections.abc import Collection, Iterable
from datetime import timedelta

from django.db import connections

from exactly_once.sql.connections import fetch
from exactly_once.sql.now import DatabaseTime
from inbox.conf import inbox_options
from inbox.models import KeptHandler
from inbox.store.dialect import RECEIPTS

CONFIRMED_EVERY = timedelta(hours=1)
_MARGIN = timedelta(days=1)
"""A process may store messages for hours after it was last able to confirm its period."""


def record(alias: str, handlers: Iterable[str]) -> None:
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


def recorded(alias: str, what: str) -> dict[str, timedelta]:
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


def unrecorded(alias: str, known: Collection[str]) -> list[str]:
    """The other handlers that have receipts. One index lookup for each handler."""
    first = f"(SELECT handler FROM {RECEIPTS} WHERE handler > {{}} ORDER BY handler LIMIT 1)"
    sql = (
        f"WITH RECURSIVE stored(handler) AS (SELECT {first.format('%s')} UNION ALL SELECT {first.format('stored.handler')} "
        "FROM stored WHERE stored.handler IS NOT NULL) SELECT handler FROM stored WHERE handler IS NOT NULL"
    )
    return [name for (name,) in fetch(connections[alias], sql, [""]) if name not in known]

"""Which stored messages are due: looked up handler by handler, in the index `inbox_due` (handler, time of the next attempt).

A process runs only the messages of handlers that it knows and, with a rate limit, has a token for. With an index by time alone,
every poll would first read all due messages of other handlers. One query for each handler reads one index entry, however many
messages there are.

Rows that another session has locked are skipped, but every poll reads them. So on PostgreSQL only a few rows are tried: those
due longest, if all of them are locked some that follow, at random, so that the oldest of these is soon among them, and then
those due last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from django.db import connections, transaction

from exactly_once.sql.connections import fetch
from exactly_once.sql.now import NOW
from exactly_once.sql.prepared_statements import KEEP_PLANS
from exactly_once.wire.formats import RUN_ELSEWHERE
from inbox.models import PausedHandler
from inbox.states import DUE
from inbox.store.dialect import IS_OPEN, PAUSED_HANDLERS, TABLE

STORED = f"state IN ({', '.join(repr(state.value) for state in DUE)}) AND {IS_OPEN}"
"""Messages that are run when their next attempt is due, as in the index `inbox_due`."""
MOST_COUNTED = 1_000
"""Limit for counting the messages of an unknown handler."""
_TRIED, _LAST_TRIED = 16, 4
"""Rows of runs longer than `REDELIVERY_AFTER` are locked and due longest: at most one for each worker of all processes."""
_FOLLOWING = f"OFFSET {_TRIED} + {_TRIED} * floor(random() * 16)::int"
NOT_QUARANTINED = "AND NOT (attempts > 0 AND state IN ('received', 'running') AND NOT stopping)"
# A scalar sub-select, because a join could return the handlers in another order.
NOT_PAUSED = f"(SELECT 1 FROM {PAUSED_HANDLERS} paused WHERE paused.handler = {{name}}) IS NULL"
"""The handler that `name` is an expression of is not paused."""
_UNPAUSED = {
    "postgresql": (
        "(SELECT name AS handler FROM json_array_elements_text(%s::json) AS given(name) "
        f"WHERE {NOT_PAUSED.format(name='given.name')}) AS wanted"
    ),
    "sqlite": f"(SELECT value AS handler FROM json_each(%s) WHERE {NOT_PAUSED.format(name='value')}) AS wanted",
}
"""A list of handlers as rows, in its order, without those that an operator has paused."""


CLAIM = f"UPDATE {TABLE} AS m SET attempts = attempts + 1, fence = fence + 1, next_attempt_at = {{after}}"
"""Of rows that `first_due` has locked. Unless it ends before, the attempt is due again then."""


def first_due(vendor: str, also: str = "") -> str:
    """A query for the id of one due message: the one due longest, of the first handler that has any.

    Its parameter is the handlers, a JSON array. Paused handlers are left out. On PostgreSQL the row is locked, and a few rows
    that other transactions have locked are skipped.

    Args:
        also: a further condition.
    """
    wanted = _UNPAUSED[vendor]
    if vendor != "postgresql":
        return f"SELECT id FROM (SELECT ({_longest_due(vendor, also)}) AS id FROM {wanted}) WHERE id IS NOT NULL LIMIT 1"
    first = _longest_due(vendor, also, most=_TRIED)
    last = _longest_due(vendor, also, order="DESC", most=_LAST_TRIED)
    # With CASE the planner must use the primary key; without it, it may read the whole index of due rows.
    lock = (
        f"SELECT id FROM {TABLE} WHERE id = tried.id AND {IS_OPEN} "
        f"AND CASE WHEN {STORED} THEN next_attempt_at <= {NOW[vendor]} ELSE false END FOR UPDATE SKIP LOCKED"
    )
    # LIMIT stops the lateral queries as soon as one row is locked.
    return (
        f"SELECT found.id FROM {wanted}, LATERAL (({first}) UNION ALL ({first} {_FOLLOWING}) UNION ALL ({last})) "
        f"AS tried, LATERAL ({lock}) AS found LIMIT 1"
    )


def due_handlers(alias: str, handlers: Sequence[str]) -> list[str]:
    """Those of `handlers` that have a due message and are not paused, in their order."""
    if not handlers:
        return []
    connection = connections[alias]
    probe, wanted = _longest_due(connection.vendor), _UNPAUSED[connection.vendor]
    sql = f"SELECT handler FROM {wanted} WHERE ({probe}) IS NOT NULL"
    return [handler for (handler,) in fetch(connection, sql, [json.dumps([*handlers])])]


def next_due(alias: str, after: str, among: str, most: int) -> list[str]:
    """The next handlers in alphabetical order that have a due message and are not paused.

    Args:
        after: a name, which need not exist.
        among: a condition on `wanted.handler`.
    """
    probe, unpaused = _longest_due(connections[alias].vendor), NOT_PAUSED.format(name="wanted.handler")
    also = f"AND {among} AND {unpaused} AND ({probe}) IS NOT NULL LIMIT {most}"
    return _of_stored_handlers(alias, "handler", also, after=after)


def longest_due(alias: str) -> list[int]:
    """For every handler, the message that has been due longest, if any is due."""
    rows = _of_stored_handlers(alias, f"({_longest_due(connections[alias].vendor)})")
    return [row for row in rows if row is not None]


def stored_handlers(alias: str) -> list[str]:
    """The handlers with messages that are run when due, in alphabetical order."""
    return _of_stored_handlers(alias, "handler")


def _of_stored_handlers(alias: str, what: str, also: str = "", *, after: str = "") -> list[Any]:
    """An expression of `wanted.handler`, for each handler with messages that are run when due: one index lookup for each."""
    first = f"(SELECT handler FROM {TABLE} stored WHERE {STORED} AND handler > {{}} ORDER BY handler LIMIT 1)"
    sql = (
        f"WITH RECURSIVE wanted(handler) AS (SELECT {first.format('%s')} UNION ALL SELECT {first.format('wanted.handler')} "
        f"FROM wanted WHERE wanted.handler IS NOT NULL) SELECT {what} FROM wanted WHERE handler IS NOT NULL {also}"
    )
    connection = connections[alias]
    if connection.vendor != "postgresql" or connection.in_atomic_block:
        return [found for (found,) in fetch(connection, sql, [after])]
    # A table that was never analysed may be filled at once: the planner then takes a sort of all entries for cheaper.
    with transaction.atomic(using=alias):
        fetch(connection, f"SELECT {KEEP_PLANS}")
        return [found for (found,) in fetch(connection, sql, [after])]


def paused_handlers(alias: str) -> frozenset[str]:
    """The names of the handlers that operators have paused."""
    return frozenset(PausedHandler.objects.using(alias).values_list("handler", flat=True))


def orphans(alias: str, handlers: Sequence[str]) -> dict[str, int]:
    """By handler, how many messages are stored for handlers not in `handlers`, counted up to `MOST_COUNTED`.

    Celery's tasks and the messages to webhook endpoints are left out, because other processes run them.
    """
    unknown = [name for name in stored_handlers(alias) if name not in {*handlers} and not name.startswith(RUN_ELSEWHERE)]
    counted = f"SELECT count(*) FROM (SELECT 1 FROM {TABLE} WHERE handler = %s AND {STORED} LIMIT {MOST_COUNTED}) AS counted"
    return {name: fetch(connections[alias], counted, [name])[0][0] for name in unknown}


def _longest_due(vendor: str, also: str = "", *, order: str = "ASC", most: int = 1) -> str:
    return (
        f"SELECT id FROM {TABLE} stored WHERE stored.handler = wanted.handler AND {STORED} "
        f"AND next_attempt_at <= {NOW[vendor]} {also} ORDER BY next_attempt_at {order} LIMIT {most}"
    )

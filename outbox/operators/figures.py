"""The figures of the overview: counts by state, and the message that has waited longest. None of them reads all messages."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from django.db import connections

from exactly_once.console.operators.clock_ahead import Dated
from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.counts import Count, count_each, count_up_to_limit, earliest, estimated, instant
from exactly_once.sql.days import FIRST_DAY, LIVE
from exactly_once.sql.now import now_after
from exactly_once.upkeep.minutes import database_time
from outbox.models import SHARDS, PausedTopic, PendingCallback
from outbox.states import SETTLED, State
from outbox.store.claiming import SECONDARY, STREAM
from outbox.store.dialect import HISTORY, TABLE, live

_BY_DUE_TIME = (State.SCHEDULED, State.RETRYING, State.PREPARED, State.STUCK)
WAITING = (State.READY, State.WAITING, State.SCHEDULED, State.RETRYING)
"""States whose earliest due time is of interest, once it has passed."""

DATED = (
    Dated(
        table=TABLE,
        due="available_at",
        written="failed_at",
        where=f"day = {LIVE} AND state = '{State.RETRYING}'",
        state=State.RETRYING,
    ),
    Dated(table=PendingCallback._meta.db_table, due="available_at", written="settled_at", where="id IS NOT NULL"),
    Dated(table=PausedTopic._meta.db_table, due="probe_at", written="paused_at", where="paused_by = ''"),
)
"""Rows that wait until an instant. Those of a scheduled message may be its publisher's, and are not among them."""


def counts(alias: str) -> dict[State, Count]:
    """The number of messages in each state, up to a limit; of published messages beyond it the planner's estimate."""
    settled_in = HISTORY if is_postgresql(connections[alias]) else TABLE
    found = count_up_to_limit(alias, _sources(alias, State), column="available_at")
    by_state = {state: found[state] for state in State}
    for state in SETTLED:
        if by_state[state].is_cut:
            estimate = estimated(alias, f"FROM {settled_in} WHERE state = '{state}'")
            by_state[state] = estimate or by_state[state]
    return by_state


def counts_by_topic(alias: str, states: Iterable[State]) -> dict[str, dict[str, Count]]:
    """The number of messages in each of these states by topic, up to a limit for each state; of scheduled ones those due."""
    sources = _sources(alias, states)
    if State.SCHEDULED in sources:
        connection = connections[alias]
        due = f"state = '{State.SCHEDULED}' AND day = {LIVE} AND available_at <= {now_after(connection) % 0}"
        sources[State.SCHEDULED] = [f"FROM {live(connection)} WHERE {due} ORDER BY available_at, id"]
    return count_each(alias, sources, column="available_at", by="topic")


def _sources(alias: str, states: Iterable[State]) -> dict[str, list[str]]:
    """Where the messages of each state are found by an index."""
    connection = connections[alias]
    table, is_partitioned = live(connection), is_postgresql(connection)
    settled_in = HISTORY if is_partitioned else TABLE
    sources: dict[str, list[str]] = {}
    for state in states:
        if state in SETTLED:
            # The index of the others has this condition.
            others = "" if state is State.PUBLISHED else " AND state <> 'published'"
            sources[state] = [f"FROM {settled_in} WHERE state = '{state}' AND day >= {FIRST_DAY}{others}"]
        elif state is State.READY:
            sources[state] = [f"FROM {table} m WHERE {condition} AND day = {LIVE}" for condition in (STREAM, SECONDARY)]
        else:
            # In the order of an index, so that the planner needs no other reason to use it.
            order = " ORDER BY available_at, id" if state in _BY_DUE_TIME else ""
            sources[state] = [f"FROM {table} WHERE state = '{state}' AND day = {LIVE}{order}"]
    return sources


def oldest_due(alias: str, counted: dict[State, Count]) -> datetime | None:
    """The due time of the message that is longest overdue; None if none is due.

    Among more messages than are counted it is the earliest of those that the relays send next.
    """
    connection = connections[alias]
    ((head,),) = fetch(connection, _HEADS.format(live=live(connection), earliest=earliest(alias, "available_at")))
    at = [instant(head), *(counted[state].oldest for state in WAITING)]
    return min((found for found in at if found is not None and found <= database_time(alias)), default=None)


_HEADS = (
    f"WITH RECURSIVE shards(shard) AS (SELECT 0 UNION ALL SELECT shard + 1 FROM shards WHERE shard < {SHARDS - 1}) "
    "SELECT {earliest} FROM (SELECT (SELECT m.available_at FROM {live} m "
    f"WHERE m.shard = shards.shard AND {STREAM} ORDER BY m.id LIMIT 1) AS available_at FROM shards) heads"
)
"""The first message of the stream in each shard."""


_SHARDS = f"WITH shards(shard) AS (VALUES {', '.join(f'({shard})' for shard in range(SHARDS))})"


def has_ready_for(alias: str, lag: timedelta) -> bool:
    """Has a ready message been due for longer than `lag`?

    It reads the first message of each shard, and the secondary ready index.
    """
    connection = connections[alias]
    table, limit = live(connection), now_after(connection)
    first = f"SELECT m.available_at FROM {table} m WHERE m.shard = shards.shard AND {STREAM} ORDER BY m.id LIMIT 1"
    parameters = [-lag.total_seconds()]
    with connection.cursor() as cursor:
        cursor.execute(f"{_SHARDS} SELECT 1 FROM shards WHERE ({first}) < {limit} LIMIT 1", parameters)
        if cursor.fetchone():
            return True
        cursor.execute(f"SELECT 1 FROM {table} m WHERE {SECONDARY} AND m.available_at < {limit} LIMIT 1", parameters)
        return cursor.fetchone() is not None


def paused_topics(alias: str, most: int) -> list[PausedTopic]:
    """Topics that are paused and not being resumed, the longest first."""
    return list(PausedTopic.objects.using(alias).filter(is_resuming=False).order_by("paused_at")[:most])

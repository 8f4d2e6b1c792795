"""Counts of messages by state, and the message that has waited longest.

The pages show `counts`, which are cut at a limit. Commands and metrics have `count_states`, which reads all live messages.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Min, Q, QuerySet

from exactly_once.console.operators.clock_ahead import Dated
from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.counts import Count, count_each, count_up_to_limit, estimated, instant
from exactly_once.sql.days import FIRST_DAY, LIVE
from exactly_once.sql.now import DatabaseTime, now_after
from exactly_once.upkeep.minutes import database_time
from outbox.models import SHARDS, OutboxMessage, PausedTopic, PendingCallback
from outbox.states import SETTLED, UNDECIDED, State
from outbox.store.dialect import HISTORY, TABLE, live
from outbox.store.ready_index import SECONDARY, STREAM

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
    Dated(table=PausedTopic._meta.db_table, due="probe_at", written="paused_at", where="mode <> 'paused'"),
)
"""Rows that wait until an instant. Those of a scheduled message may be its publisher's, and are not among them."""
COUNTED_EXACTLY_BYTES = 16 * 1024 * 1024
_WAITING = Q(state__in=[State.READY, State.WAITING]) | Q(
    state__in=[State.SCHEDULED, State.RETRYING], available_at__lte=DatabaseTime()
)


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
    heads = f"SELECT {_FIRST.format(live=live(connection))} AS available_at FROM shards"
    ((head,),) = fetch(connection, f"{_SHARDS} SELECT CAST(min(available_at) AS text) FROM ({heads}) heads")
    at = [instant(head), *(counted[state].oldest for state in WAITING)]
    return min((found for found in at if found is not None and found <= database_time(alias)), default=None)


_SHARDS = f"WITH shards(shard) AS (VALUES {', '.join(f'({shard})' for shard in range(SHARDS))})"
_FIRST = f"(SELECT m.available_at FROM {{live}} m WHERE m.shard = shards.shard AND {STREAM} ORDER BY m.id LIMIT 1)"
"""The due time of the first message of the stream in a shard."""


def has_ready_for(alias: str, lag: timedelta) -> bool:
    """Has a ready message been due for longer than `lag`?

    It reads the first message of each shard, and the secondary ready index.
    """
    connection = connections[alias]
    table, limit = live(connection), now_after(connection)
    due = (
        f"{_SHARDS} SELECT 1 FROM shards WHERE {_FIRST.format(live=table)} < {limit} LIMIT 1",
        f"SELECT 1 FROM {table} m WHERE {SECONDARY} AND m.available_at < {limit} LIMIT 1",
    )
    return any(fetch(connection, each, [-lag.total_seconds()]) for each in due)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The number of messages in each state; `states` has every state.

    Attributes:
        oldest_waiting: the due time of the message that is longest overdue; None if none is due.
        estimated: the states whose number is an estimate from PostgreSQL's statistics, because counting would take long.
    """

    states: dict[str, int]
    oldest_waiting: datetime | None
    estimated: frozenset[str] = frozenset()


def count_states(alias: str) -> Counts:
    """Count the live messages. History is counted while it is small, and estimated when it is large."""
    connection = connections[alias]
    rows = OutboxMessage.objects.using(alias)
    if not is_postgresql(connection) or _size(connection) <= COUNTED_EXACTLY_BYTES:
        return _counted(rows)
    estimated_as = {state.value: estimated(alias, f"FROM {HISTORY} WHERE state = '{state}'") for state in SETTLED}
    estimates = {state: count.number for state, count in estimated_as.items() if count}
    others = count_live(alias)
    return replace(others, states=others.states | estimates, estimated=frozenset(estimates))


def count_live(alias: str) -> Counts:
    """Count the messages that are not settled, whose number does not grow with history."""
    return _counted(OutboxMessage.objects.using(alias).filter(day=LIVE))


def _counted(rows: QuerySet[OutboxMessage]) -> Counts:
    """Count all rows by one scan."""
    found = rows.values_list("state").annotate(models.Count("id"), oldest=Min("available_at", filter=_WAITING)).order_by()
    counted = {state: (count, oldest) for state, count, oldest in found}
    return Counts(
        states={state.value: counted.get(state, (0, None))[0] for state in State},
        oldest_waiting=min((oldest for _, oldest in counted.values() if oldest is not None), default=None),
    )


def _size(connection: BaseDatabaseWrapper) -> int:
    sizes = f"SELECT sum(pg_relation_size(relid)) FROM pg_partition_tree('{HISTORY}') WHERE isleaf"
    return int(fetch(connection, sizes)[0][0] or 0)


def topics_unchecked(alias: str, topics: Collection[str]) -> list[str]:
    """The topics, other than these, that have undecided messages."""
    others = OutboxMessage.objects.using(alias).filter(day=LIVE, state__in=UNDECIDED).exclude(topic__in=topics)
    return sorted(others.values_list("topic", flat=True).distinct())

"""The timer's queries: which scheduled messages are due soon; and the transition that makes them ready.

Each topic is read separately, along an index, from its offset. So a burst of one topic hides no other, a row that stays
scheduled stops no later one, and no query reads the dead versions of rows that were made ready. The topics are found one by one
from the last to the first: the last row of each topic is live, the first ones may be dead versions.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.process.clock import monotonic
from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.now import now, now_after
from outbox.models import SHARDS
from outbox.states import FIRE
from outbox.store.dialect import LIVE_PART, TABLE, any_of, array_of, array_of_places, live, repeatable, seconds_until
from outbox.store.ready_index import SECONDARY
from outbox.store.transitions import Found, move
from outbox.store.unwritable_rows import Rows, UnwritableRows

_SCHEDULED = "m.state = 'scheduled'"
_DRAWN_RECENTLY = f"(SELECT pg_sequence_last_value(pg_get_serial_sequence('{TABLE}', 'id')::regclass) - 100000)"
_LAST_FIRST = "ORDER BY m.topic DESC, m.available_at DESC, m.id DESC LIMIT 1"
_TOPICS = (
    "WITH RECURSIVE topics(topic) AS ("
    f"SELECT * FROM (SELECT m.topic FROM {{live}} m WHERE {_SCHEDULED} {_LAST_FIRST}) first "
    f"UNION ALL SELECT (SELECT m.topic FROM {{live}} m WHERE {_SCHEDULED} AND m.topic < topics.topic {_LAST_FIRST}) "
    "FROM topics WHERE topics.topic IS NOT NULL) SELECT topic FROM topics WHERE topic IS NOT NULL"
)
_TAKEN = "UNION ALL SELECT NULL, NULL, NULL, EXTRACT(epoch FROM clock_timestamp() - statement_timestamp())::float8, NULL"
"""A last row without a position, on PostgreSQL: the seconds that the query has taken."""


class Offset(NamedTuple):
    """How far a topic has been read: up to the message `position`, due `at`. At most `limit` messages are read after it."""

    at: str
    position: int
    limit: int


class Upcoming(NamedTuple):
    """A scheduled message.

    Attributes:
        due: when it is due by the database's clock, as an instant of this process's monotonic clock: a moment late.
        place: where the database has stored this version of the row (`ctid`); "" on SQLite.
    """

    position: int
    topic: str
    at: str
    due: float
    place: str


def scheduled_topics(alias: str) -> list[str]:
    """The topics that have scheduled messages."""
    connection = connections[alias]
    return [topic for (topic,) in fetch(connection, _TOPICS.format(live=live(connection)))]


def upcoming(alias: str, offsets: Mapping[str, Offset], within: timedelta, *, since: timedelta | None = None) -> list[Upcoming]:
    """The messages of these topics after their offsets that are due `within` this time from now.

    Args:
        since: read those due from this time ago; PostgreSQL passes over the dead versions of all earlier ones.
    """
    if not offsets:
        return []
    connection = connections[alias]
    if is_postgresql(connection):
        earliest = f"{now(connection)} - interval '{since.total_seconds()} seconds'" if since else "'-infinity'"
        return _fetched(
            connection,
            "SELECT m.* FROM unnest(%s::text[], %s::timestamptz[], %s::bigint[], %s::int[]) AS start(topic, at, id, most) "
            f"CROSS JOIN LATERAL ({_select(connection)} WHERE {_SCHEDULED} AND m.topic = start.topic "
            f"AND (m.available_at, m.id) > (GREATEST(start.at, {earliest}), start.id) "
            f"AND m.available_at <= {now_after(connection)} ORDER BY m.available_at, m.id LIMIT start.most) m {_TAKEN}",
            [
                list(offsets),
                [offset.at or "-infinity" for offset in offsets.values()],
                array_of(offset.position for offset in offsets.values()),
                array_of(offset.limit for offset in offsets.values()),
                within.total_seconds(),
            ],
        )
    found: list[Upcoming] = []
    for topic, (at, position, limit) in offsets.items():
        found += _fetched(
            connection,
            f"{_select(connection)} WHERE {_SCHEDULED} AND m.topic = %s AND (m.available_at, m.id) > (%s, %s) "
            f"AND m.available_at <= {now_after(connection)} ORDER BY m.available_at, m.id LIMIT %s",
            [topic, at, position, within.total_seconds(), limit],
        )
    return found


def newly_scheduled(
    alias: str, after: int, missing: Sequence[int], since: timedelta, within: timedelta, limit: int
) -> list[Upcoming]:
    """Messages due `within` from now: those at `missing`; above `after` the first `limit`, due `since` ago at the earliest."""
    connection = connections[alias]
    after_now = now_after(connection)
    due_by, (among, positions) = f"m.available_at <= {after_now}", any_of(connection, missing)
    return _fetched(
        connection,
        f"SELECT * FROM ({_select(connection)} WHERE {_SCHEDULED} AND {due_by} AND m.available_at > {after_now} "
        # In a CASE, as in `_is_due`: the missing ones are read by their positions.
        f"AND m.id > %s ORDER BY m.available_at, m.id LIMIT %s) newer UNION ALL {_select(connection)} WHERE m.id {among} "
        f"AND CASE WHEN {_SCHEDULED} THEN {due_by} ELSE false END {_TAKEN if is_postgresql(connection) else ''}",
        [within.total_seconds(), -since.total_seconds(), after, limit, positions, within.total_seconds()],
    )


def _select(connection: BaseDatabaseWrapper) -> str:
    due, place = seconds_until(connection.vendor, "m.available_at"), "m.ctid" if is_postgresql(connection) else "''"
    return f"SELECT m.id, m.topic, CAST(m.available_at AS text), {due}, CAST({place} AS text) FROM {live(connection)} m"


def fire(alias: str, messages: Mapping[int, str], unwritable: UnwritableRows | None = None) -> set[int]:
    """Apply scheduled → ready to those of the messages that are due by the database's clock; returns their positions.

    Rows that another transaction has locked, for example to cancel them, are skipped.

    Args:
        messages: the places by position. A message that has changed since is elsewhere, and is left out. If a place is "", all
            are found by their positions.
    """
    connection = connections[alias]
    unwritable = unwritable or UnwritableRows(alias, "timer")
    skipped = unwritable.skipped()
    messages = {position: place for position, place in messages.items() if position not in skipped}
    condition, parameter = any_of(connection, [*messages])
    found = placed = Found(f"SELECT id FROM {live(connection)} WHERE id {condition} AND {_is_due(connection)}", [parameter])
    if is_postgresql(connection):
        # A locked row keeps its ctid, so the UPDATE need not search for it again.
        where = f"id {condition}"
        if all(messages.values()):
            # The planner does not see how many they are: it would rather read all of a table that it thinks is small.
            where, parameter = "ctid = ANY(ARRAY(SELECT unnest(%s::tid[])))", array_of_places(messages.values())
        placed = Found(f"SELECT ctid FROM {LIVE_PART} WHERE {where} AND {_is_due(connection)}", [parameter], column="ctid")
    fired: set[int] = set()

    def change(rows: Rows) -> int:
        with repeatable(alias):
            moved = move(alias, FIRE, placed if rows is found else rows, reason="it is due")
        fired.update(one.position for one in moved)
        return len(moved)

    unwritable.change(found, change)
    return fired


def count_secondary_ready(alias: str, limit: int) -> int:
    """The number of messages in the secondary ready index, counted up to `limit`; without those that became ready long ago."""
    connection = connections[alias]
    secondary = f"SELECT 1 FROM {live(connection)} m WHERE {SECONDARY}"
    if is_postgresql(connection):
        secondary += f" AND m.ready_position > {_DRAWN_RECENTLY}"
        # Shard by shard, so that the planner reads the index and not the table.
        of_a_shard = f"{secondary} AND m.shard = s.shard LIMIT {limit:d}"
        secondary = f"SELECT 1 FROM generate_series(0, {SHARDS - 1}) s(shard) CROSS JOIN LATERAL ({of_a_shard}) m"
    return int(fetch(connection, f"SELECT count(*) FROM ({secondary} LIMIT {limit:d}) counted")[0][0])


def _is_due(connection: BaseDatabaseWrapper) -> str:
    # In a CASE, so that PostgreSQL reads no index of scheduled rows: it has all rows of a burst, and their dead versions.
    return f"CASE WHEN state = 'scheduled' THEN available_at <= {now(connection)} ELSE false END"


def _fetched(connection: BaseDatabaseWrapper, query: str, parameters: Sequence[Any]) -> list[Upcoming]:
    """The rows of a query. Reading and converting many of them takes long, and must not make all of them late."""
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        answered, rows = monotonic(), cursor.fetchall()
    began_at = answered - sum(row[3] for row in rows if row[0] is None)
    return [Upcoming(row[0], row[1], row[2], began_at + row[3], row[4]) for row in rows if row[0] is not None]

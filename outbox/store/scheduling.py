"""What the timer reads and does: which scheduled messages are due soon, and their becoming ready.

Every topic is read by itself, along an index, from the place where it was left. So a burst of one topic hides no other, no row
stops what lies behind it, and nobody wades through the dead versions of what has been made ready. The topics are found one by
one from the last one backward, because the far end of each, unlike its near one, is alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from django.db import Error, connections

from outbox.database.connections import is_postgresql
from outbox.database.now import now, now_after
from outbox.kernel.refused_rows import RefusedRows
from outbox.models import SHARDS
from outbox.states import FIRE
from outbox.store.claiming import SECONDARY
from outbox.store.dialect import LIVE_PART, TABLE, any_of, array_of, live
from outbox.store.halving import found_apart, may_be_halved, undone_if_refused
from outbox.store.transitions import Found, move

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_SCHEDULED = "m.state = 'scheduled'"
_LAST_FIRST = "ORDER BY m.topic DESC, m.available_at DESC, m.id DESC LIMIT 1"
_TOPICS = (
    "WITH RECURSIVE topics(topic) AS ("
    f"SELECT * FROM (SELECT m.topic FROM {{live}} m WHERE {_SCHEDULED} {_LAST_FIRST}) first "
    f"UNION ALL SELECT (SELECT m.topic FROM {{live}} m WHERE {_SCHEDULED} AND m.topic < topics.topic {_LAST_FIRST}) "
    "FROM topics WHERE topics.topic IS NOT NULL) "
)


class Place(NamedTuple):
    """How far a topic's timetable has been read: up to the message `position`, which is due `at`; and how many more to read."""

    at: str
    position: int
    room: int


class Upcoming(NamedTuple):
    """A scheduled message, due in so many `seconds` by the database's clock: less than 0 when it is overdue."""

    position: int
    topic: str
    at: str
    seconds: float


def upcoming(alias: str, places: Mapping[str, Place], within: timedelta, each: int) -> list[Upcoming]:
    """What is due `within` that span from now, of every topic the next after its place, or the first `each` if it has none."""
    connection = connections[alias]
    if is_postgresql(connection):
        return _upcoming(connection, places, within, each)
    with connection.cursor() as cursor:
        cursor.execute(f"{_TOPICS.format(live=TABLE)} SELECT topic FROM topics WHERE topic IS NOT NULL")
        topics = [topic for (topic,) in cursor.fetchall()]
        found: list[Upcoming] = []
        for topic in topics:
            at, position, room = places.get(topic, Place("", 0, each))
            cursor.execute(
                f"SELECT m.id, m.topic, CAST(m.available_at AS text), {_seconds(connection)} FROM {TABLE} m WHERE {_SCHEDULED} "
                "AND m.topic = %s AND (m.available_at, m.id) > (%s, %s) "
                f"AND m.available_at <= {now_after(connection)} ORDER BY m.available_at, m.id LIMIT %s",
                [topic, at, position, within.total_seconds(), room],
            )
            found += map(Upcoming._make, cursor.fetchall())
    return found


def _upcoming(connection: BaseDatabaseWrapper, places: Mapping[str, Place], within: timedelta, each: int) -> list[Upcoming]:
    with connection.cursor() as cursor:
        cursor.execute(
            f"{_TOPICS.format(live=LIVE_PART)} SELECT m.id, topics.topic, CAST(m.available_at AS text), {_seconds(connection)} "
            "FROM topics "
            "LEFT JOIN unnest(%s::text[], %s::timestamptz[], %s::bigint[], %s::int[]) AS place(topic, at, id, room) "
            f"ON place.topic = topics.topic CROSS JOIN LATERAL (SELECT m.id, m.available_at FROM {LIVE_PART} m "
            f"WHERE {_SCHEDULED} AND m.topic = topics.topic "
            "AND (m.available_at, m.id) > (COALESCE(place.at, '-infinity'), COALESCE(place.id, 0)) "
            f"AND m.available_at <= {now_after(connection)} ORDER BY m.available_at, m.id LIMIT COALESCE(place.room, %s)) m "
            "WHERE topics.topic IS NOT NULL",
            [
                list(places),
                [place.at or "-infinity" for place in places.values()],
                array_of(place.position for place in places.values()),
                array_of(place.room for place in places.values()),
                within.total_seconds(),
                each,
            ],
        )
        return list(map(Upcoming._make, cursor.fetchall()))


def newly_scheduled(alias: str, after: int, since: timedelta, within: timedelta, limit: int) -> list[Upcoming]:
    """What was written behind the position `after` and is due between so long ago and so soon, the first `limit`."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT m.id, m.topic, CAST(m.available_at AS text), {_seconds(connection)} FROM {live(connection)} m "
            f"WHERE {_SCHEDULED} AND m.available_at > {now_after(connection)} AND m.available_at <= {now_after(connection)} "
            "AND m.id > %s ORDER BY m.available_at, m.id LIMIT %s",
            [-since.total_seconds(), within.total_seconds(), after, limit],
        )
        return list(map(Upcoming._make, cursor.fetchall()))


def fire(alias: str, positions: Sequence[int], refused: RefusedRows | None = None) -> set[int]:
    """scheduled → ready for those of these whose time has come by the database's clock; which they were.

    Those that somebody has locked, to cancel them perhaps, are left alone.

    Args:
        refused: the rows that the database refuses to change. They are left out, and the others are changed; None raises.
    """
    connection = connections[alias]
    if refused is not None and (skipped := refused.skipped()):
        positions = [position for position in positions if position not in skipped]
    condition, parameter = any_of(connection, positions)
    due = f"id {condition} AND state = 'scheduled' AND available_at <= {now(connection)}"
    if is_postgresql(connection):
        # To be found by their ids, and not by the index on what is due, which has all of a burst and all that was fired of it.
        due = due.replace("available_at <=", "available_at + interval '0' <=")
    found = placed = Found(f"SELECT id FROM {live(connection)} WHERE {due}", [parameter])
    if is_postgresql(connection):
        # Locked rows stay where they are, so they need not be found a second time.
        placed = Found(f"SELECT ctid FROM {LIVE_PART} WHERE {due}", [parameter], column="ctid")
    try:
        with undone_if_refused(alias):
            fired = _fired(alias, placed)
    except Error as error:
        if refused is None or not may_be_halved(error, len(positions)):
            raise
    else:
        if refused is not None:
            refused.retried(among=positions)
        return fired
    return set(found_apart(alias, found, lambda some: len(_fired(alias, some)), refused).done)


def _fired(alias: str, rows: Sequence[int] | Found) -> set[int]:
    return {moved.position for moved in move(alias, FIRE, rows, reason="it is due")}


def count_secondary_ready(alias: str, limit: int) -> int:
    """The number of messages in the secondary ready index, counted up to `limit`."""
    connection = connections[alias]
    secondary = f"SELECT 1 FROM {live(connection)} m WHERE {SECONDARY}"
    if is_postgresql(connection):
        # Shard by shard, so that their index is read, and not the table.
        of_a_shard = f"{secondary} AND m.shard = s.shard LIMIT {limit:d}"
        secondary = f"SELECT 1 FROM generate_series(0, {SHARDS - 1}) s(shard) CROSS JOIN LATERAL ({of_a_shard}) m"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM ({secondary} LIMIT {limit:d}) counted")
        count: int = cursor.fetchone()[0]
    return count


def _seconds(connection: BaseDatabaseWrapper) -> str:
    """A number also of the instant `-infinity`, or of text that is no instant, which is as good as overdue."""
    if is_postgresql(connection):
        long_ago = f"{now(connection)} - interval '1 day'"
        return f"CAST(EXTRACT(epoch FROM GREATEST(m.available_at, {long_ago}) - {now(connection)}) AS float8)"
    return f"COALESCE((julianday(m.available_at) - julianday({now(connection)})) * 86400.0, -1.0)"

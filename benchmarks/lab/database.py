"""The database of a project: empty it, fill it, and read when its rows were settled.

Rows are written by COPY with the values that `publish()` wrote for a specimen, so that they have the columns and values that
it writes today. Only what distinguishes messages is replaced: ids, topic, key, shard, body, instants, and the state of those
that are due later.
"""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from typing import Any

import psycopg
from psycopg import sql

from benchmarks.lab.workload import Due, Keys, Topics, biz_id, number_of, one_topic, payload, serialised
from exactly_once.wire.identity import new_message_id

OUTBOX = sql.Identifier("outbox_outboxmessage")
LIVE = sql.Identifier("outbox_outboxmessage_live")
"""The part of it that every message passes through."""
SHARDS = 64
"""As `outbox.models.SHARDS`, which cannot be imported without Django."""
LONGEST_LOCK_WAIT = "30s"
"""For us: what a process that has been killed holds is released in less."""
LANES = 2
"""As `outbox.relay.service` deals the shards out in turn."""


@dataclass(frozen=True)
class Specimen:
    """A row as `publish()` writes it: the columns, their types' oids, the values."""

    columns: Sequence[str]
    types: Sequence[int]
    values: Sequence[Any]

    @classmethod
    def read(cls, connection: psycopg.Connection[Any]) -> Specimen:
        cursor = connection.execute(sql.SQL("SELECT * FROM {}").format(OUTBOX))
        row = cursor.fetchone()
        assert row is not None
        assert cursor.description is not None
        kept = [i for i, column in enumerate(cursor.description) if column.name != "id"]
        described = [cursor.description[i] for i in kept]
        return cls(
            columns=[column.name for column in described],
            types=[column.type_code for column in described],
            values=[row[i] for i in kept],
        )


@dataclass(frozen=True)
class Settled:
    """One transaction of a relay: how many rows it settled, when (seconds, by the database's clock), and in which lane."""

    rows: int
    at: float
    lane: int = 0


class Database:
    def __init__(self, url: str, specimen: Specimen) -> None:
        self.url = url
        self.specimen = specimen

    @cached_property
    def connection(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, autocommit=True, options=f"-c lock_timeout={LONGEST_LOCK_WAIT}")

    def value(self, query: str, *parameters: object) -> Any:
        row = self.connection.execute(query, parameters).fetchone()  # type: ignore[arg-type]
        return None if row is None else row[0]

    def empty(self) -> None:
        """No rows, no dead rows, numbers from 1, and a checkpoint behind us."""
        tables = self.value(
            "SELECT string_agg(quote_ident(relname), ', ') FROM pg_stat_user_tables WHERE relname <> 'django_migrations'"
        )
        self.connection.execute(f"TRUNCATE {tables} RESTART IDENTITY CASCADE")
        self.connection.execute("CHECKPOINT")

    def numbers_drawn(self) -> int:
        """From all sequences: more whenever a row with a serial number was inserted."""
        return int(self.value("SELECT coalesce(sum(last_value), 0) FROM pg_sequences"))

    def sweep(self) -> None:
        """Nothing that was published is left, only what is scheduled; the next `preload` vacuums."""
        self.connection.execute(sql.SQL("DELETE FROM {} WHERE state = 'published'").format(OUTBOX))

    def preload(self, count: int, keys: Keys, *, first: int = 0, topics: Topics = one_topic, due: Due | None = None) -> float:
        """Commit messages `first` to `first + count - 1`, as `copy` writes them, and vacuum; rows per second of the COPY."""
        began = time.perf_counter()
        with self.connection.transaction():
            self.copy(count, keys, first=first, topics=topics, due=due)
        rate = count / (time.perf_counter() - began)
        self.connection.execute(sql.SQL("VACUUM (ANALYZE) {}").format(OUTBOX))
        return rate

    @contextmanager
    def uncommitted(self, count: int, keys: Keys) -> Iterator[None]:
        """Messages that become visible, all at once, when the block ends; the planner knows of them already."""
        with self.connection.transaction():
            self.copy(count, keys)
            self.connection.execute(sql.SQL("ANALYZE {}").format(OUTBOX))
            yield

    def copy(self, count: int, keys: Keys, *, first: int = 0, topics: Topics = one_topic, due: Due | None = None) -> None:
        """Messages that are ready to be relayed, or scheduled for when they are `due`."""
        columns, values = self.specimen.columns, list(self.specimen.values)
        place = {column: columns.index(column) for column in columns}
        now = self.value("SELECT now()")
        for i, value in enumerate(values):
            if isinstance(value, datetime):
                values[i] = now
        if due:
            values[place["state"]] = "scheduled"
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
            OUTBOX, sql.SQL(", ").join(map(sql.Identifier, columns))
        )
        with self.connection.cursor() as cursor, cursor.copy(statement) as copy:
            copy.set_types(self.specimen.types)
            for number in range(first, first + count):
                message_id, key = new_message_id(), keys(number)
                values[place["message_id"]] = message_id
                values[place["correlation_id"]] = str(message_id)
                values[place["biz_id"]] = biz_id(number)
                values[place["topic"]] = topics(number)
                values[place["key"]] = key
                values[place["shard"]] = _shard(key, message_id)
                values[place["body"]] = serialised(payload(number))
                if due:
                    at = datetime.fromtimestamp(due(number), tz=UTC)
                    values[place["available_at"]] = values[place["deliver_at"]] = at
                copy.write_row(values)

    def now(self) -> float:
        """Seconds, by the database's clock."""
        return float(self.value("SELECT extract(epoch FROM clock_timestamp())"))

    def settled(self, since: float = 0.0) -> list[Settled]:
        """The relays' transactions that published something, in the order of their time.

        A row's xmin is the transaction that wrote it last, which is the one that settled it.
        """
        rows = self.connection.execute(
            sql.SQL(
                "SELECT count(*), extract(epoch FROM max(settled_at))::float8, min(shard) %% {} FROM {} "
                "WHERE state = 'published' AND settled_at > to_timestamp(%s) GROUP BY xmin::text ORDER BY 2"
            ).format(sql.Literal(LANES), OUTBOX),
            [since],
        )
        return [Settled(rows=count, at=at, lane=lane) for count, at, lane in rows]

    def committed(self) -> Iterator[tuple[uuid.UUID, int]]:
        """Message id and number of every committed message but those that are not due yet, in the order they were written."""
        with self.connection.transaction(), self.connection.cursor(name="committed") as cursor:
            cursor.itersize = 10_000
            cursor.execute(sql.SQL("SELECT message_id, biz_id FROM {} WHERE state <> 'scheduled' ORDER BY id").format(OUTBOX))
            for message_id, biz_id in cursor:
                yield message_id, number_of(biz_id)

    def states(self) -> dict[str, int]:
        rows = self.connection.execute(sql.SQL("SELECT state, count(*) FROM {} GROUP BY state").format(OUTBOX))
        return dict(rows.fetchall())


def rate(settled: Sequence[Settled], *, first: int | None = None) -> float:
    """Messages per second from when every lane has ended its first transaction to the end of the last transaction.

    What was settled until then is left out of the count, as the time it took is: a process that is still importing or
    connecting is not relaying yet. With `first`, up to the transaction that settled that many messages.
    """
    at_work = _all_at_work(settled)
    counted = 0
    for end in settled[at_work + 1 :]:
        counted += end.rows
        if first is not None and counted >= first:
            break
    if not counted:
        raise ValueError(f"{len(settled)} transactions of a relay make no rate")
    return counted / (end.at - settled[at_work].at)


def rate_of_last(settled: Sequence[Settled], last: int) -> float:
    """Messages per second over the transactions that settled the last so many messages."""
    counted = 0
    for before, each in reversed(list(pairwise(settled))):
        counted += each.rows
        if counted >= last:
            return counted / (settled[-1].at - before.at)
    raise ValueError(f"{counted} messages were settled after the first transaction, not {last}")


def _all_at_work(settled: Sequence[Settled]) -> int:
    """The place of the transaction with which the last of the lanes ended its first."""
    first_of_lane: dict[int, int] = {}
    for place, each in enumerate(settled):
        first_of_lane.setdefault(each.lane, place)
    return max(first_of_lane.values(), default=0)


def _shard(key: str, message_id: uuid.UUID) -> int:
    return zlib.crc32(key.encode() or message_id.bytes) % SHARDS

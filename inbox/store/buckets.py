"""Token buckets shared by all processes of a handler: how many messages may they take now?

A bucket is refilled at the handler's rate up to its *burst*, and every message takes a token (the leaky bucket as a meter,
Turner 1986). Processes lease whole tokens in small portions. A bucket is one row in the handler's database and uses its clock,
so the clocks of the processes may differ. On PostgreSQL a lease is one statement, so a frozen process holds no lock.
"""

import math
from dataclasses import dataclass

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.sql.connections import execute, fetch, is_postgresql
from exactly_once.sql.now import now
from inbox.models import TokenBucket

TABLE = TokenBucket._meta.db_table


@dataclass(frozen=True, slots=True)
class Leased:
    """The leased tokens of a process.

    Attributes:
        tokens: how many messages it may take.
        left: tokens left in the bucket.
    """

    tokens: int
    left: float


def refill_and_take(tokens: float, elapsed: float, *, rate: float, burst: float, most: int) -> Leased:
    """Refill a bucket that held `tokens` `elapsed` seconds ago, and take up to `most`. A clock that was set back adds none."""
    level = min(burst, tokens + rate * max(0.0, elapsed))
    leased = min(most, math.floor(level))
    return Leased(leased, level - leased)


def lease_tokens(alias: str, handler: str, *, rate: float, burst: float, most: int) -> Leased:
    """Take up to `most` tokens from the bucket of `handler`, which is full at its first use.

    Call it outside transactions, so that the lease is committed at once and other processes do not wait for a handler.
    """
    connection = connections[alias]
    lease = _lease_on_postgresql if is_postgresql(connection) else _lease_on_sqlite
    leased = lease(connection, handler, rate, burst, most)
    while leased is None:
        _create(connection, handler, burst)
        leased = lease(connection, handler, rate, burst, most)
    return leased


def _create(connection: BaseDatabaseWrapper, handler: str, burst: float) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {TABLE} (handler, tokens, filled_at) VALUES (%s, %s, {now(connection)}) "
            "ON CONFLICT (handler) DO NOTHING",
            [handler, burst],
        )


def _lease_on_postgresql(connection: BaseDatabaseWrapper, handler: str, rate: float, burst: float, most: int) -> Leased | None:
    # The clock is read after the lock, because waiting for another lease would look like a clock that was set back. The commit
    # does not wait for the disk: if a server crash loses leases, the bucket still holds no more than its burst.
    sql = (
        "WITH held AS MATERIALIZED (SELECT handler, tokens, filled_at, set_config('synchronous_commit', 'off', true) "
        f"FROM {TABLE} WHERE handler = %s FOR UPDATE), "
        "dated AS MATERIALIZED (SELECT handler, tokens, filled_at, clock_timestamp() AS at FROM held), "
        "filled AS (SELECT handler, at, LEAST(%s::float8, tokens + %s::float8 * "
        "GREATEST(0, EXTRACT(EPOCH FROM at - filled_at)::float8)) AS level FROM dated), "
        "leased AS (SELECT handler, at, level, LEAST(%s, FLOOR(level))::int AS tokens FROM filled) "
        f"UPDATE {TABLE} bucket SET tokens = leased.level - leased.tokens, filled_at = leased.at FROM leased "
        "WHERE bucket.handler = leased.handler RETURNING leased.tokens, bucket.tokens"
    )
    found = fetch(connection, sql, [handler, burst, rate, most])
    return Leased(*found[0]) if found else None


def _lease_on_sqlite(connection: BaseDatabaseWrapper, handler: str, rate: float, burst: float, most: int) -> Leased | None:
    at = now(connection)
    with transaction.atomic(using=connection.alias, durable=True):
        found = fetch(
            connection,
            f"SELECT tokens, (JULIANDAY({at}) - JULIANDAY(filled_at)) * 86400.0, {at} FROM {TABLE} WHERE handler = %s",
            [handler],
        )
        if not found:
            return None
        tokens, elapsed, at = found[0]
        leased = refill_and_take(tokens, elapsed, rate=rate, burst=burst, most=most)
        execute(connection, f"UPDATE {TABLE} SET tokens = %s, filled_at = %s WHERE handler = %s", [leased.left, at, handler])
    return leased

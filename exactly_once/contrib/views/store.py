"""The rows of idempotent requests: claim a key, store its response, read it, and find what has expired.

A claim is an INSERT into the transaction of the view. On PostgreSQL it first tries a lock of the key that ends with the
transaction, so the second of two concurrent requests finds out at once that the first is running. Without that lock it would
wait for the commit at the unique index, as on SQLite, where a transaction waits for the only writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.db import connections
from django.db.models import QuerySet
from django.utils.translation import gettext as _

from exactly_once.contrib.views.models import IdempotentRequest
from exactly_once.sql.connections import fetch, is_postgresql, with_table
from exactly_once.sql.now import DatabaseTime, now_after
from exactly_once.upkeep.housekeeping import OldRows

_CLAIM = (
    "INSERT INTO {table} AS held (scope, key, view, fingerprint, at, expires_at) "
    "SELECT %s, %s, %s, %s, {now}, {now} WHERE {free} "
    "ON CONFLICT (scope, key) DO UPDATE SET view = excluded.view, fingerprint = excluded.fingerprint, at = excluded.at, "
    "expires_at = excluded.expires_at, status = NULL WHERE held.expires_at <= excluded.at RETURNING id"
)
_LOCK = "pg_try_advisory_xact_lock(hashtextextended(%s, hashtextextended('idempotent view ' || %s, 0)))"


def insert(alias: str, row: IdempotentRequest, expires_in: timedelta) -> None:
    """Insert the row, or take over an expired one; set its pk. None: the key has a response, or is in use by a request."""
    connection = connections[alias]
    free, lock = (_LOCK, [row.key, row.scope]) if is_postgresql(connection) else ("TRUE", [])
    sql = _CLAIM.format(table=connection.ops.quote_name(row._meta.db_table), now=now_after(connection), free=free)
    found = fetch(connection, sql, [row.scope, row.key, row.view, row.fingerprint, 0, expires_in.total_seconds(), *lock])
    row.pk = next((pk for (pk,) in found), None)


def stored(alias: str, row: IdempotentRequest) -> IdempotentRequest | None:
    """The row of the same key, with its response. None: a request with it is running."""
    rows = IdempotentRequest.objects.using(alias)
    return rows.filter(scope=row.scope, key=row.key, expires_at__gt=DatabaseTime()).first()


def expired(alias: str) -> Iterator[OldRows]:
    """What housekeeping deletes in this database, if it has the table."""
    if with_table(IdempotentRequest, [alias])[0]:
        rows: QuerySet[Any] = IdempotentRequest.objects.using(alias).filter(expires_at__lte=DatabaseTime())
        yield OldRows(_("idempotent requests"), rows, by="expires_at")

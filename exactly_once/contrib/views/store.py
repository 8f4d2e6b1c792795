"""The rows of idempotent requests: claim a key, store its response, read it, and find what has expired.

A claim is an INSERT into the transaction of the view. On PostgreSQL it first tries a lock of the key that ends with the
transaction, so the second of two concurrent requests finds out at once that the first is running. Without that lock it would
wait for the commit at the unique index, as on SQLite, where a transaction waits for the only writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any

from django.db import connections, router
from django.db.models import QuerySet
from django.utils.translation import gettext as _

from exactly_once.contrib.views.models import IdempotentRequest
from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.now import DatabaseTime, now_after
from exactly_once.upkeep.housekeeping import OldRows

_CLAIM = (
    "INSERT INTO {table} AS held (scope, key, view, fingerprint, at, expires_at) "
    "SELECT %s, %s, %s, %s, {now}, {now} WHERE {free} "
    "ON CONFLICT (scope, key) DO UPDATE SET view = excluded.view, fingerprint = excluded.fingerprint, at = excluded.at, "
    "expires_at = excluded.expires_at, status = NULL WHERE held.expires_at <= excluded.at RETURNING id"
)


@dataclass(frozen=True)
class Claim:
    """A key of a scope, and the request that has it.

    Attributes:
        alias: of the database.
        view: the name of the view.
        expires_in: how long the response is stored.
    """

    alias: str
    scope: str
    key: str
    view: str
    fingerprint: str
    expires_in: timedelta

    @property
    def _lock(self) -> int:
        table = IdempotentRequest._meta.db_table
        return int.from_bytes(sha256(repr((table, self.scope, self.key)).encode()).digest()[:8], signed=True)

    def insert(self) -> int | None:
        """Insert the row, or take over an expired one. None: the key has a response, or a request with it is running."""
        connection = connections[self.alias]
        locks = is_postgresql(connection)
        sql = _CLAIM.format(
            table=connection.ops.quote_name(IdempotentRequest._meta.db_table),
            now=now_after(connection),
            free="pg_try_advisory_xact_lock(%s)" if locks else "%s = 0",
        )
        row = [self.scope, self.key, self.view, self.fingerprint, 0, self.expires_in.total_seconds()]
        given = [*row, self._lock if locks else 0]
        return next((row for (row,) in fetch(connection, sql, given)), None)

    def stored(self) -> IdempotentRequest | None:
        """The row of the key, with its response. None: a request with it is running."""
        rows = IdempotentRequest.objects.using(self.alias)
        return rows.filter(scope=self.scope, key=self.key, expires_at__gt=DatabaseTime()).first()


def keep(alias: str, row: int, status: int, headers: dict[str, str], body: bytes) -> bool:
    """Store the response in the transaction that inserted the row. False: the row does not exist."""
    rows = IdempotentRequest.objects.using(alias).filter(pk=row)
    return rows.update(status=status, headers=headers, body=body) == 1


def expired(alias: str) -> Iterator[OldRows]:
    """What housekeeping deletes in this database."""
    if router.allow_migrate_model(alias, IdempotentRequest):
        rows: QuerySet[Any] = IdempotentRequest.objects.using(alias).filter(expires_at__lte=DatabaseTime())
        yield OldRows(_("idempotent requests"), rows, by="expires_at")

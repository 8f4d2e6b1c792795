"""What the modules of the store share: the table, and small differences between the databases."""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from outbox.database.connections import is_postgresql
from outbox.models import OutboxMessage, PausedTopic

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_T = TypeVar("_T")

TABLE = OutboxMessage._meta.db_table
PAUSED_TOPICS = PausedTopic._meta.db_table
LOCK_SPACE = zlib.crc32(TABLE.encode()) - 2**31
"""First key of every advisory lock of the outbox; the second is the shard."""


def any_of(connection: BaseDatabaseWrapper, values: Sequence[int]) -> tuple[str, Any]:
    """A condition "is one of these numbers" and its one parameter, however many they are."""
    if is_postgresql(connection):
        return "= ANY(%s::bigint[])", array_of(values)
    return "IN (SELECT value FROM json_each(%s))", json.dumps(list(values))


def array_of(numbers: Iterable[int]) -> str:
    """An array as PostgreSQL writes it. psycopg's dumper of lists costs more than what these are for."""
    return f"{{{','.join(map(str, numbers))}}}"


def as_uuid(value: uuid.UUID | str) -> uuid.UUID:
    return value if isinstance(value, uuid.UUID) else uuid.UUID(value)


def chunks(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk

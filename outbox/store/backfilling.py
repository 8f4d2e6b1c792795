"""The past of a new handler: published messages of history, and waiting for passes."""

from collections.abc import Sequence
from datetime import datetime

from django.db import connections

from exactly_once.sql.connections import execute, is_postgresql
from outbox.models import SHARDS
from outbox.states import State
from outbox.store.dialect import LOCK_SPACE
from outbox.store.looking import require_writable
from outbox.store.messages import RelayedMessage, parts_of_published, read_published
from outbox.store.selecting import Selection


def read_past(
    alias: str, topics: Sequence[str], since: datetime | None, until: datetime | None, after: int, most: int
) -> tuple[list[RelayedMessage], int, bool]:
    """The first published messages of the topics behind a position, in the order of publishing.

    Returns:
        The messages that still exist, the position up to which they were read, and whether they are all.
    """
    published = Selection(states=[State.PUBLISHED], since=since, until=until).messages(alias)
    chosen = published.filter(topic__in=topics, pk__gt=after)
    positions = list(chosen.order_by("pk").values_list("pk", flat=True)[:most])
    if not positions:
        return [], after, True
    part = parts_of_published(alias, positions)[0]
    return read_published(alias, part), part[-1], len(part) == len(positions) < most


def wait_for_passes(alias: str) -> None:
    """Wait until every pass that is running has ended, and its outcome is stored."""
    if not is_postgresql(connections[alias]):
        require_writable(alias)  # a pass has the write lock
        return
    # Each statement is its own transaction, so a process that is frozen here holds no lock.
    for shard in range(SHARDS):
        execute(connections[alias], f"SELECT pg_advisory_xact_lock({LOCK_SPACE}, %s)", [shard])


def stop_passes(alias: str) -> None:
    """Wait for the running passes; none begins until the open transaction ends."""
    if is_postgresql(connections[alias]):  # else the open transaction has the write lock
        locked = f"SELECT pg_advisory_xact_lock({LOCK_SPACE}, shard) FROM generate_series(0, {SHARDS - 1}) shard"
        execute(connections[alias], locked)

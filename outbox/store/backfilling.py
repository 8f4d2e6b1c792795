"""The past of a new handler: published messages of history, and waiting for passes."""

import time
from collections.abc import Sequence
from datetime import datetime

from django.db import OperationalError, connections

from exactly_once.process.clock import monotonic
from outbox.models import SHARDS
from outbox.states import State
from outbox.store.claiming import claims_by_locks
from outbox.store.dialect import LOCK_SPACE
from outbox.store.lease import in_hand
from outbox.store.messages import RelayedMessage, parts_of_published, read_published
from outbox.store.selecting import Selection

_LONGEST_PASS_SECONDS = 30.0
_POLL_SECONDS = 0.02


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
    """Wait until every pass that is running has ended, and its outcome is stored.

    Raises:
        django.db.OperationalError: a relay of a SQLite database has not settled its messages in time.
    """
    if claims_by_locks(alias):
        # Each statement is its own transaction, so a process that is frozen here holds no lock.
        with connections[alias].cursor() as cursor:
            for shard in range(SHARDS):
                cursor.execute(f"SELECT pg_advisory_xact_lock({LOCK_SPACE}, %s)", [shard])
        return
    begun = in_hand(alias)
    until = monotonic() + _LONGEST_PASS_SECONDS
    while begun & in_hand(alias):
        if monotonic() > until:
            raise OperationalError("a relay has not settled its messages")
        time.sleep(_POLL_SECONDS)


def stop_passes(alias: str) -> None:
    """Wait for the running passes; none begins until the open transaction ends."""
    if not claims_by_locks(alias):
        return  # the write lock of the open transaction
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT pg_advisory_xact_lock({LOCK_SPACE}, shard) FROM generate_series(0, {SHARDS - 1}) shard")

"""Heartbeats of consumers; see `kernel.heartbeat`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import connections

from inbox.models import ConsumerHeartbeat
from inbox.store.dialect import is_postgresql, now
from outbox.kernel.clock import now_after
from outbox.kernel.heartbeat import ProcessIdentity, delete_silent, with_silence

if TYPE_CHECKING:
    from django.db.models import QuerySet

_TABLE = ConsumerHeartbeat._meta.db_table


@dataclass(frozen=True, kw_only=True)
class ConsumerState:
    """What one process says of itself.

    Attributes:
        running_for: since its start.
        handlers: names of those on this database that it takes messages for.
        received: deliveries since its start.
        ran: stored messages that it has run since its start.
        waits_for: what keeps it from working; "" when it works.
    """

    identity: ProcessIdentity
    running_for: timedelta
    handlers: Sequence[str]
    received: int
    ran: int
    waits_for: str


def write_heartbeat(alias: str, state: ConsumerState) -> None:
    """Write the row of this process, or write it again: one statement, in autocommit."""
    connection = connections[alias]
    handlers = "%s::jsonb" if is_postgresql(connection) else "%s"
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {_TABLE} (id, host, pid, version, handlers, received, ran, waits_for, started_at, beat_at) "
            f"VALUES (%s, %s, %s, %s, {handlers}, %s, %s, %s, {now_after(connection)}, {now(connection)}) "
            "ON CONFLICT (id) DO UPDATE SET handlers = EXCLUDED.handlers, received = EXCLUDED.received, ran = EXCLUDED.ran, "
            "waits_for = EXCLUDED.waits_for, beat_at = EXCLUDED.beat_at",
            [
                *state.identity.columns(connection),
                json.dumps(list(state.handlers)),
                state.received,
                state.ran,
                state.waits_for,
                -state.running_for.total_seconds(),
            ],
        )


def delete_heartbeat(alias: str, process: uuid.UUID) -> None:
    """Delete the row of a process that ends in an orderly way."""
    ConsumerHeartbeat.objects.using(alias).filter(pk=process).delete()


def delete_silent_heartbeats(alias: str, older_than: timedelta) -> int:
    """Delete the rows of processes that have been silent for `older_than`; how many there were."""
    return delete_silent(ConsumerHeartbeat.objects.using(alias).all(), older_than)


def consumers(alias: str) -> QuerySet[Any]:
    """Every consumer that is known, the silent ones last, each with `silent` and with `database_now`, when it was looked at."""
    return with_silence(ConsumerHeartbeat.objects.using(alias).all())

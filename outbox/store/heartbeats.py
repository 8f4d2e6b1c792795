"""Heartbeats of relays; see `kernel.heartbeat`."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import connections

from outbox.kernel.clock import now_after
from outbox.kernel.heartbeat import ProcessIdentity, delete_silent, with_silence
from outbox.models import RelayHeartbeat
from outbox.store.dialect import now

if TYPE_CHECKING:
    from django.db.models import QuerySet

TABLE = RelayHeartbeat._meta.db_table


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What one relay process says of itself. Spans count back from now.

    Attributes:
        running_for: since its start.
        since_pass: since its last successful pass; None when there was none yet.
        published: messages since its start.
        rate: messages per second, lately.
        waits_for: what keeps it from working; "" when it works.
    """

    identity: ProcessIdentity
    running_for: timedelta
    since_pass: timedelta | None
    published: int
    rate: float
    waits_for: str


def beat(alias: str, told: Beat) -> None:
    """Write the row of this process, or write it again: one statement, in autocommit."""
    connection = connections[alias]
    ago = now_after(connection)
    last_pass = "NULL" if told.since_pass is None else ago
    spans = [told.running_for] if told.since_pass is None else [told.running_for, told.since_pass]
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {TABLE} (id, host, pid, version, published, rate, waits_for, started_at, last_pass_at, beat_at) "
            f"VALUES (%s, %s, %s, %s, %s, %s, %s, {ago}, {last_pass}, {now(connection)}) "
            "ON CONFLICT (id) DO UPDATE SET published = EXCLUDED.published, rate = EXCLUDED.rate, "
            "waits_for = EXCLUDED.waits_for, last_pass_at = EXCLUDED.last_pass_at, beat_at = EXCLUDED.beat_at",
            [
                *told.identity.columns(connection),
                told.published,
                told.rate,
                told.waits_for,
                *(-span.total_seconds() for span in spans),
            ],
        )


def retire(alias: str, relay: uuid.UUID) -> None:
    """Delete the row of a relay that ends in an orderly way."""
    RelayHeartbeat.objects.using(alias).filter(pk=relay).delete()


def forget_silent(alias: str, older_than: timedelta) -> int:
    """Delete the rows of relays that have been silent for `older_than`; how many there were."""
    return delete_silent(RelayHeartbeat.objects.using(alias).all(), older_than)


def relays(alias: str) -> QuerySet[Any]:
    """Every relay that is known, the silent ones last, each with `silent` and with `database_now`, when it was looked at."""
    return with_silence(RelayHeartbeat.objects.using(alias).all())

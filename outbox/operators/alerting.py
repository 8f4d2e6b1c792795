"""The queries of the outbox's alert conditions. None reads more than one row for each shard, topic or dead message."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import connections

from exactly_once.sql.now import DatabaseTime, now_after
from outbox.models import SHARDS, OutboxMessage, PausedTopic
from outbox.states import LIVE, State
from outbox.store import heartbeats
from outbox.store.claiming import SECONDARY, STREAM
from outbox.store.dialect import live

_SHARDS = f"WITH shards(shard) AS (VALUES {', '.join(f'({shard})' for shard in range(SHARDS))})"


def is_relayed(alias: str) -> bool:
    """Is a relay running?"""
    return bool(heartbeats.relays.rows(alias).filter(silent=False).exists())


def was_relayed(alias: str) -> bool:
    """Is there a relay that has fallen silent?"""
    return bool(heartbeats.relays.rows(alias).filter(silent=True).exists())


def has_waiting(alias: str) -> bool:
    """Is a message ready, retrying or scheduled?"""
    waiting = OutboxMessage.objects.using(alias).filter(day=LIVE, state__in=[State.READY, State.RETRYING, State.SCHEDULED])
    return bool(waiting.exists())


def is_late(alias: str, lag: timedelta) -> bool:
    """Has a ready message been due for longer than `lag`?

    It reads the first message of each shard, and the secondary ready index.
    """
    connection = connections[alias]
    table, limit = live(connection), now_after(connection)
    first = f"SELECT m.available_at FROM {table} m WHERE m.shard = shards.shard AND {STREAM} ORDER BY m.id LIMIT 1"
    parameters = [-lag.total_seconds()]
    with connection.cursor() as cursor:
        cursor.execute(f"{_SHARDS} SELECT 1 FROM shards WHERE ({first}) < {limit} LIMIT 1", parameters)
        if cursor.fetchone():
            return True
        cursor.execute(f"SELECT 1 FROM {table} m WHERE {SECONDARY} AND m.available_at < {limit} LIMIT 1", parameters)
        return cursor.fetchone() is not None


def newly_dead(alias: str, within: timedelta) -> int:
    """How many dead messages became so within this time."""
    dead = OutboxMessage.objects.using(alias).filter(day=LIVE, state=State.DEAD, settled_at__gte=DatabaseTime(-within))
    return dead.count()


def stuck(alias: str) -> int:
    """How many prepared messages are stuck."""
    return OutboxMessage.objects.using(alias).filter(day=LIVE, state=State.STUCK).count()


def long_paused(alias: str, longer_than: timedelta) -> list[Any]:
    """The topics that are paused for longer than this."""
    rows = PausedTopic.objects.using(alias).filter(is_resuming=False, paused_at__lt=DatabaseTime(-longer_than))
    return list(rows.order_by("topic"))

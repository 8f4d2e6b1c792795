"""Select published messages of history to be sent again."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import OperationalError, connections
from django.db.models import Count, Max, Min, Q, QuerySet

from exactly_once.models import Lease, Operation
from exactly_once.process.clock import monotonic
from exactly_once.sql.connections import is_outermost, is_postgresql
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.identity import process_name
from exactly_once.wire.text import NAME_LENGTH
from outbox.conf import outbox_options
from outbox.models import SHARDS, OutboxMessage, PausedTopic
from outbox.states import FIRST_DAY, State
from outbox.store.claiming import RelayedMessage, claims_by_locks, parts_of_published, read_published
from outbox.store.dialect import LOCK_SPACE
from outbox.store.lease import in_hand

_EPOCH_ORDINAL = datetime(1970, 1, 1).toordinal()  # noqa: DTZ001 - only its date is used
_PLANNING = "outbox: planning a replay"
_LONGEST_PASS_SECONDS = 30.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Messages of history that meet all given conditions.

    Attributes:
        since, until: limits of the instant at which they were settled; `until` is exclusive.
    """

    topic: str | None = None
    biz_id: str | None = None
    since: datetime | None = None
    until: datetime | None = None


class Replayable(NamedTuple):
    """The selected messages of one topic and state.

    Attributes:
        messages: their number.
        expired: the number of those that have expired since, and are not sent again.
        oldest, newest: when the first and the last of them was settled.
    """

    topic: str
    state: str
    messages: int
    expired: int
    oldest: datetime
    newest: datetime


def preview(alias: str, selection: Selection) -> list[Replayable]:
    """The selected messages, by topic and state."""
    expired = Count("id", filter=Q(expires_at__lte=DatabaseTime()))
    groups = _chosen(alias, selection).order_by("topic", "state").values_list("topic", "state")
    counted = groups.annotate(Count("id"), expired=expired, oldest=Min("settled_at"), newest=Max("settled_at"))
    return [Replayable._make(group) for group in counted]


def positions(alias: str, selection: Selection) -> Iterator[int]:
    """The positions of the selected messages that are published, in the order of publishing."""
    published = _chosen(alias, selection).filter(state=State.PUBLISHED)
    return published.order_by("pk").values_list("pk", flat=True).iterator(chunk_size=10_000)


def plan_alone(alias: str) -> None:
    """Wait until no other transaction plans a replay; none does until the open transaction ends."""
    lease = Lease.objects.using(alias).filter(name=_PLANNING)
    holder = process_name()[:NAME_LENGTH]
    # The first statement writes, because SQLite refuses to upgrade a transaction that has read an older snapshot.
    if not lease.update(holder=holder):
        now = DatabaseTime()
        row = Lease(name=_PLANNING, token=uuid.UUID(int=0), holder=holder, valid_from=now, expires_at=now)
        Lease.objects.using(alias).bulk_create([row], ignore_conflicts=True)
        lease.update(holder=holder)


def open_replay(alias: str, action: str, given: dict[str, str]) -> Operation | None:
    """The replay of the same selection that is planned or running, if there is one."""
    rows = Operation.objects.using(alias).filter(action=action, state__in=["planned", "running"]).order_by("pk")
    return next((operation for operation in rows if operation.given == given), None)


def paused_topics(alias: str) -> frozenset[str]:
    """The topics that an operator has paused. Those of the circuit breaker may have a queue again."""
    rows = PausedTopic.objects.using(alias).filter(is_resuming=False).exclude(paused_by="")
    return frozenset(rows.values_list("topic", flat=True))


def _chosen(alias: str, selection: Selection) -> QuerySet[OutboxMessage]:
    wanted = {
        "topic": selection.topic,
        "biz_id": selection.biz_id,
        "settled_at__gte": selection.since,
        "settled_at__lt": selection.until,
        # Whole partitions are left out. A row's day may differ from that of `settled_at` by a moment at midnight.
        "day__gte": max(FIRST_DAY, _day(selection.since) - 1) if selection.since else FIRST_DAY,
        "day__lte": _day(selection.until) + 1 if selection.until else None,
    }
    given = {field: value for field, value in wanted.items() if value is not None}
    return OutboxMessage.objects.using(alias).filter(**given)


def _day(instant: datetime) -> int:
    return (instant - (instant.utcoffset() or timedelta())).toordinal() - _EPOCH_ORDINAL


def read_past(
    alias: str, topic: str, since: datetime | None, until: datetime | None, after: int, most: int
) -> tuple[list[RelayedMessage], int, bool]:
    """The first published messages of a topic behind a position, in the order of publishing.

    Returns:
        The messages that still exist, the position up to which they were read, and whether they are all.
    """
    chosen = _chosen(alias, Selection(topic=topic, since=since, until=until)).filter(state=State.PUBLISHED, pk__gt=after)
    positions = list(chosen.order_by("pk").values_list("pk", flat=True)[:most])
    if not positions:
        return [], after, True
    part = parts_of_published(alias, positions, outbox_options().BATCH_BYTES)[0]
    return read_published(alias, part), part[-1], len(part) == len(positions) < most


def bound_step(alias: str, longest: timedelta) -> None:
    """Let the server end the open transaction if this process is frozen; it may hold all shards.

    It must be the transaction's first statement, because it sets the isolation level: with REPEATABLE READ, what was published
    while it waited for a lock would not be seen.
    """
    # In the transaction of a test the settings would remain.
    if not (is_postgresql(connections[alias]) and is_outermost(connections[alias])):
        return
    milliseconds = int(longest.total_seconds() * 1000)
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; "
            f"SET LOCAL idle_in_transaction_session_timeout = {milliseconds}; SET LOCAL statement_timeout = {milliseconds}"
        )


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

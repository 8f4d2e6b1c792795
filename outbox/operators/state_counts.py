"""The number of messages in each state."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Count, Min, Q, QuerySet

from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.counts import estimated
from exactly_once.sql.days import LIVE
from exactly_once.sql.now import DatabaseTime
from outbox.models import OutboxMessage
from outbox.states import SETTLED, UNDECIDED, State
from outbox.store.dialect import HISTORY

COUNTED_EXACTLY_BYTES = 16 * 1024 * 1024
_WAITING = Q(state__in=[State.READY, State.WAITING]) | Q(
    state__in=[State.SCHEDULED, State.RETRYING], available_at__lte=DatabaseTime()
)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The number of messages in each state; `states` has every state.

    Attributes:
        oldest_waiting: the due time of the message that is longest overdue; None if none is due.
        estimated: the states whose number is an estimate from PostgreSQL's statistics, because counting would take long.
    """

    states: dict[str, int]
    oldest_waiting: datetime | None
    estimated: frozenset[str] = frozenset()


def count_states(alias: str) -> Counts:
    """Count the live messages. History is counted while it is small, and estimated when it is large."""
    connection = connections[alias]
    rows = OutboxMessage.objects.using(alias)
    if not is_postgresql(connection) or _size(connection) <= COUNTED_EXACTLY_BYTES:
        return _counted(rows)
    estimated_as = {state.value: estimated(alias, f"FROM {HISTORY} WHERE state = '{state}'") for state in SETTLED}
    estimates = {state: count.number for state, count in estimated_as.items() if count}
    live = _counted(rows.filter(day=LIVE))
    return replace(live, states=live.states | estimates, estimated=frozenset(estimates))


def _counted(rows: QuerySet[OutboxMessage]) -> Counts:
    """Count all rows by one scan."""
    found = rows.values_list("state").annotate(Count("id"), oldest=Min("available_at", filter=_WAITING)).order_by()
    counted = {state: (count, oldest) for state, count, oldest in found}
    return Counts(
        states={state.value: counted.get(state, (0, None))[0] for state in State},
        oldest_waiting=min((oldest for _, oldest in counted.values() if oldest is not None), default=None),
    )


def _size(connection: BaseDatabaseWrapper) -> int:
    sizes = f"SELECT sum(pg_relation_size(relid)) FROM pg_partition_tree('{HISTORY}') WHERE isleaf"
    return int(fetch(connection, sizes)[0][0] or 0)


def topics_unchecked(alias: str, topics: Collection[str]) -> list[str]:
    """The topics, other than these, that have undecided messages."""
    others = OutboxMessage.objects.using(alias).filter(day=LIVE, state__in=UNDECIDED).exclude(topic__in=topics)
    return sorted(others.values_list("topic", flat=True).distinct())

"""The figures of the overview: counts by state, and the message that has waited longest. None of them reads all messages."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from django.db import connections
from django.db.models import Min

from exactly_once.sql.counts import Count, count_each, count_up_to_limit, estimated
from inbox.models import SETTLED, InboxMessage, State, TrailEntry
from inbox.store.dialect import TABLE
from inbox.store.due import longest_due

_INDEXES = {
    **dict.fromkeys(State, "state IN ('received', 'retrying', 'waiting', 'running', 'dead')"),
    State.DONE: "state IN ('done', 'skipped', 'shed')",
    State.SKIPPED: "state IN ('skipped', 'shed')",
    State.SHED: "state IN ('skipped', 'shed')",
}
"""The condition of the index of each state."""
_PAIRS = {
    "postgresql": (
        "WITH RECURSIVE pairs AS ("
        f"(SELECT m.handler, m.topic FROM {TABLE} m ORDER BY m.handler, m.topic LIMIT 1) UNION ALL "
        f"SELECT following.* FROM pairs, LATERAL (SELECT m.handler, m.topic FROM {TABLE} m "
        "WHERE (m.handler, m.topic) > (pairs.handler, pairs.topic) ORDER BY m.handler, m.topic LIMIT 1) following"
        ") SELECT handler, topic FROM pairs LIMIT %s"
    ),
    "sqlite": f"SELECT DISTINCT m.handler, m.topic FROM {TABLE} m ORDER BY m.handler, m.topic LIMIT %s",
}
"""On PostgreSQL a loose index scan: one index lookup for each pair, not for each message."""


def counts(alias: str) -> dict[State, Count]:
    """The number of messages in each state, up to a limit; of settled messages beyond it the planner's estimate."""
    found = count_up_to_limit(alias, _sources(State), column="received_at")
    by_state = {state: found[state] for state in State}
    for state in SETTLED:
        if by_state[state].is_cut:
            by_state[state] = estimated(alias, f"FROM {TABLE} WHERE state = '{state}'") or by_state[state]
    return by_state


def counts_by_handler(alias: str, states: Iterable[State]) -> dict[str, dict[str, Count]]:
    """The number of messages in each of these states by handler, up to a limit for each state."""
    return count_each(alias, _sources(states), column="received_at", by="handler")


def _sources(states: Iterable[State]) -> dict[str, list[str]]:
    """Where the messages of each state are found by an index."""
    return {str(state): [f"FROM {TABLE} WHERE state = '{state}' AND {_INDEXES[state]}"] for state in states}


def oldest_settled(alias: str) -> datetime | None:
    """When the oldest settled message that is still stored was settled."""
    settled = InboxMessage.objects.using(alias).filter(state__in=SETTLED, settled_at__isnull=False)
    return settled.order_by("settled_at").values_list("settled_at", flat=True).first()


def oldest_entry(alias: str) -> datetime | None:
    """The instant of the oldest entry of the trail."""
    return TrailEntry.objects.using(alias).order_by("at").values_list("at", flat=True).first()


def oldest_waiting(alias: str) -> datetime | None:
    """The time since which the oldest message has waited, past its due time or behind its key's head; None: none waits."""
    messages = InboxMessage.objects.using(alias)
    due = messages.filter(pk__in=longest_due(alias)).aggregate(since=Min("next_attempt_at"))
    behind = messages.filter(state=State.WAITING).aggregate(since=Min("received_at"))
    return min(filter(None, (due["since"], behind["since"])), default=None)


def handlers_with_topics(alias: str, most: int = 10_000) -> list[tuple[str, str]]:
    """The handlers of all messages with their topics, up to a limit."""
    with connections[alias].cursor() as cursor:
        cursor.execute(_PAIRS[connections[alias].vendor], [most])
        return list(cursor.fetchall())


def handlers_and_topics(alias: str) -> tuple[list[str], list[str]]:
    """The handlers and the topics of all messages, up to a limit."""
    found = handlers_with_topics(alias)
    return sorted({handler for handler, _ in found}), sorted({topic for _, topic in found})

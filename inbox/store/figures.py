"""The figures of the overview: counts by state, and the message that has waited longest. None of them reads all messages."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from exactly_once.sql.counts import Count, count_each, count_up_to_limit, estimated
from inbox.models import SETTLED, InboxMessage, State, TrailEntry
from inbox.store.dialect import TABLE

_INDEXES = {
    **dict.fromkeys(State, "state IN ('received', 'retrying', 'waiting', 'running', 'dead')"),
    State.DONE: "state IN ('done', 'skipped', 'shed')",
    State.SKIPPED: "state IN ('skipped', 'shed')",
    State.SHED: "state IN ('skipped', 'shed')",
}
"""The condition of the index of each state."""


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

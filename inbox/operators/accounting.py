"""The accounting of all deliveries: one row for the first of a message, one count for each further one.

Most rows are settled. They are counted without being read: each count and sum has a partial index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.db import connections
from django.db.models import Count

from inbox.models import SETTLED, InboxMessage, State
from inbox.store.dialect import TABLE

_OPEN = tuple(state for state in State if state not in SETTLED)
_RARE = (State.SKIPPED, State.SHED)
_COUNTS = ("duplicates", "redeliveries", "resends", "replays", "conflicts")


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Deliveries that had no second effect, by their cause, and how many of them had other content."""

    suppressed: int
    redelivery: int
    resend: int
    replay: int
    conflicting: int

    @property
    def business(self) -> int:
        return self.suppressed - self.redelivery - self.resend - self.replay


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The outcome of every delivery according to the table, at one instant.

    Attributes:
        states: number of rows in each state; every state is named.
        edited: number of rows that are not deliveries: each has the payload of another row, corrected by an operator.
        quarantined: number of dead letters that only an override runs, see `decisions.override_maximum_age`.
    """

    states: Mapping[str, int]
    duplicates: Duplicates
    edited: int
    quarantined: int

    @property
    def delivered(self) -> int:
        """Number of accepted deliveries of messages whose rows have not been purged."""
        return sum(self.states.values()) - self.edited + self.duplicates.suppressed


def balance(alias: str) -> Balance:
    """Read all counts in one statement, so that no message is counted twice or missed while it changes its state.

    It reads the whole index of the settled rows: about 50 ms for a million rows on PostgreSQL.
    """
    zeros = ", 0" * (len(_COUNTS) - 1)
    sums = ", ".join(f"COALESCE(SUM({column}), 0)" for column in _COUNTS)
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"SELECT state, COUNT(*){zeros} FROM {TABLE} WHERE state IN ({_listed(_OPEN)}) GROUP BY state "
            f"UNION ALL SELECT state, COUNT(*){zeros} FROM {TABLE} WHERE state IN ({_listed(_RARE)}) GROUP BY state "
            f"UNION ALL SELECT 'settled', COUNT(*){zeros} FROM {TABLE} WHERE state IN ({_listed(SETTLED)}) "
            f"UNION ALL SELECT 'quarantined', COUNT(*){zeros} FROM {TABLE} WHERE state = 'dead' AND quarantined "
            f"UNION ALL SELECT 'edited', COUNT(*){zeros} FROM {TABLE} WHERE replaces_id IS NOT NULL "
            f"UNION ALL SELECT 'duplicates', {sums} FROM {TABLE} WHERE duplicates > 0"
        )
        found = {name: counts for name, *counts in cursor.fetchall()}
    states = {state.value: found.get(state.value, [0])[0] for state in State}
    states[State.DONE] = found["settled"][0] - sum(states[state] for state in _RARE)
    suppressed, redelivery, resend, replay, conflicting = map(int, found["duplicates"])
    return Balance(
        states=states,
        duplicates=Duplicates(
            suppressed=suppressed, redelivery=redelivery, resend=resend, replay=replay, conflicting=conflicting
        ),
        edited=found["edited"][0],
        quarantined=found["quarantined"][0],
    )


def open_states(alias: str) -> Mapping[str, int]:
    """The number of rows in each state that is not final. It reads the index of open messages only."""
    found = InboxMessage.objects.using(alias).filter(state__in=_OPEN).values_list("state").annotate(Count("id")).order_by()
    counts = dict(found)
    return {state.value: counts.get(state.value, 0) for state in _OPEN}


def conflicts(alias: str, limit: int) -> Sequence[InboxMessage]:
    """The rows with a duplicate that has other content, the latest conflict first, without their bodies."""
    rows = InboxMessage.objects.using(alias).filter(conflicts__gt=0)
    return list(rows.defer("body", "headers", "traceback", "conflicting_body").order_by("-conflicting_at", "-id")[:limit])


def _listed(states: Sequence[State]) -> str:
    return ", ".join(f"'{state.value}'" for state in states)

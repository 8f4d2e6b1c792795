"""What is in the tables of the inbox: counts by state and by handler, the oldest rows, and the balance of all deliveries.

The balance counts one row for the first delivery of a message, and one duplicate for each further one. Most rows are history.
They are counted without being read: each count and sum has a partial index.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import connections
from django.db.models import Count, Min

from exactly_once.console.operators.clock_ahead import Dated
from exactly_once.sql import counts as counting
from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.days import FIRST_DAY, LIVE
from inbox.housekeeping import HISTORY
from inbox.models import InboxMessage
from inbox.states import SETTLED, State
from inbox.store.dialect import IS_OPEN, TABLE
from inbox.store.due import longest_due, stored_handlers
from inbox.store.receipts import handlers_with_topics

_OPEN = tuple(state for state in State if state not in SETTLED)
_RARE = (State.SKIPPED, State.SHED)
_COUNTS = ("duplicates", "redeliveries", "resends", "replays", "conflicts")
_INDEXES = {
    **dict.fromkeys(State, f"state IN ('received', 'retrying', 'waiting', 'running', 'dead') AND {IS_OPEN}"),
    State.DONE: f"day >= {FIRST_DAY}",
    **dict.fromkeys(_RARE, f"state IN ('skipped', 'shed') AND state <> 'done' AND day >= {FIRST_DAY}"),
}
"""The condition of the index of each state, on SQLite and on PostgreSQL."""
DATED = tuple(
    Dated(
        table=TABLE,
        due="next_attempt_at",
        written=written,
        where=f"{IS_OPEN} AND state = '{state}'",
        state=state,
        first=lambda alias: ("handler", stored_handlers(alias)),
    )
    for state, written in ((State.RECEIVED, "received_at"), (State.RETRYING, "failed_at"))
)
"""Rows that wait until an instant."""


@dataclass(frozen=True)
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
        quarantined: number of dead letters that only an override runs, see `decisions.overriding`.
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

    It reads a whole index of history: about 50 ms for a million rows on PostgreSQL.
    """
    is_open = ", ".join(f"'{state.value}'" for state in _OPEN)
    zeros = ", 0" * (len(_COUNTS) - 1)
    # The table of history, because its partitions have no index of the day.
    history = f"{HISTORY.days.history}" if is_postgresql(connections[alias]) else f"{TABLE} WHERE day >= {FIRST_DAY}"
    sums = ", ".join(f"COALESCE(SUM({column}), 0)" for column in _COUNTS)
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"SELECT state, COUNT(*){zeros} FROM {TABLE} WHERE state IN ({is_open}) AND {IS_OPEN} GROUP BY state "
            f"UNION ALL SELECT state, COUNT(*){zeros} FROM {TABLE} WHERE {_INDEXES[State.SHED]} GROUP BY state "
            f"UNION ALL SELECT 'settled', COUNT(*){zeros} FROM {history} "
            f"UNION ALL SELECT 'quarantined', COUNT(*){zeros} FROM {TABLE} WHERE state = 'dead' AND quarantined AND {IS_OPEN} "
            f"UNION ALL SELECT 'edited', COUNT(*){zeros} FROM {TABLE} WHERE replaces_id IS NOT NULL "
            f"UNION ALL SELECT 'duplicates', {sums} FROM {TABLE} WHERE duplicates > 0"
        )
        found = {name: counts for name, *counts in cursor.fetchall()}
    states = {state.value: found.get(state.value, [0])[0] for state in State}
    states[State.DONE] = found["settled"][0] - sum(states[state] for state in _RARE)
    return Balance(
        states=states,
        duplicates=Duplicates(*map(int, found["duplicates"])),
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


def counts(alias: str) -> dict[State, counting.Count]:
    """The number of messages in each state, up to a limit; of settled messages beyond it the planner's estimate."""
    found = counting.count_up_to_limit(alias, _sources(State), column="received_at")
    by_state = {state: found[state] for state in State}
    for state in SETTLED:
        if by_state[state].is_cut:
            by_state[state] = counting.estimated(alias, f"FROM {TABLE} WHERE state = '{state}'") or by_state[state]
    return by_state


def counts_by_handler(alias: str, states: Iterable[State]) -> dict[str, dict[str, counting.Count]]:
    """The number of messages in each of these states by handler, up to a limit for each state."""
    return counting.count_each(alias, _sources(states), column="received_at", by="handler")


def _sources(states: Iterable[State]) -> dict[str, list[str]]:
    """Where the messages of each state are found by an index."""
    return {str(state): [f"FROM {TABLE} WHERE state = '{state}' AND {_INDEXES[state]}"] for state in states}


def oldest_waiting(alias: str) -> datetime | None:
    """The time since which the oldest message has waited, past its due time or behind its key's head; None: none waits."""
    messages = InboxMessage.objects.using(alias).filter(day=LIVE)
    due = messages.filter(pk__in=longest_due(alias)).aggregate(since=Min("next_attempt_at"))
    behind = messages.filter(state=State.WAITING).aggregate(since=Min("received_at"))
    return min(filter(None, (due["since"], behind["since"])), default=None)


def handlers_and_topics(alias: str) -> tuple[list[str], list[str]]:
    """The handlers and the topics of all messages, up to a limit."""
    found = handlers_with_topics(alias)
    return sorted({handler for handler, _ in found}), sorted({topic for _, topic in found})

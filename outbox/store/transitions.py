"""Executes the transitions that `outbox.states` declares: one guarded UPDATE, and its entries in the trail.

Nothing else changes the state of a message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections, transaction
from django.db.models.sql import UpdateQuery

from outbox.database.connections import is_postgresql
from outbox.models import OutboxMessage
from outbox.states import State, Transition
from outbox.store.dialect import any_of
from outbox.store.trail import is_recorded, record

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_updates: dict[tuple[str, str], tuple[str, Sequence[Any]]] = {}
"""The UPDATE by kind of database and transition, where it is always the same: compiling it takes as long as executing it."""


class Found(NamedTuple):
    """Which messages to move: what a query finds, all of it in the one state that the transition leads from.

    They are locked where they are found, so that no condition is needed at the update, and found once: PostgreSQL may execute
    a subquery with a LIMIT anew for every row of the other side of a join, each time locking and finding others, when its
    statistics are of another time. An array it computes once.

    Attributes:
        query: it selects `column`.
        locking: how PostgreSQL locks what it finds; "" when the query says it itself.
    """

    query: str
    parameters: Sequence[Any]
    locking: str = "FOR UPDATE SKIP LOCKED"
    column: str = "id"

    def condition(self, connection: BaseDatabaseWrapper) -> str:
        if is_postgresql(connection):
            return f"{self.column} = ANY(ARRAY({self.query} {self.locking}))"
        return f"{self.column} IN ({self.query})"


class Moved(NamedTuple):
    """A message that a transition has changed."""

    position: int
    was: str
    became: str


def move(
    alias: str,
    transition: Transition,
    rows: Sequence[int] | Found,
    *,
    only: Collection[State] = (),
    reason: str = "",
    recorded: bool | None = None,
    **given: Any,
) -> list[Moved]:
    """Change the state of those of the messages that are in a state which the transition leads from; which they were.

    In the open transaction, or one of its own. Messages that another transaction has locked are waited for, unless a query has
    left them out.

    Args:
        rows: positions, or a query that finds and locks them.
        only: of these sources only.
        reason: for the trail: who decided and why.
        recorded: for this execution, in place of what the transition says.
        given: what the transition's columns are computed from.
    """
    connection = connections[alias]
    sources = [source for source in transition.sources if not only or source in only]
    # Without a savepoint: whoever has opened a transaction undoes all of it.
    with transaction.atomic(using=alias, savepoint=False), connection.cursor() as cursor:
        moved: list[Moved] = []
        for was, its in _by_source(connection, rows, sources).items():
            cursor.execute(*_statement(connection, transition, was, its, given, " RETURNING id, state"))
            moved += [Moved(position, was, became) for position, became in cursor.fetchall()]
        if is_recorded(decision=transition.recorded if recorded is None else recorded):
            _record(alias, moved, reason)
    return moved


def count_moved(
    alias: str,
    transition: Transition,
    rows: Sequence[int] | Found,
    *,
    reason: str = "",
    recorded: bool | None = None,
    **given: Any,
) -> int:
    """How many `move` has changed, for a transition with one source; nothing is read that the trail does not need."""
    if is_recorded(decision=transition.recorded if recorded is None else recorded):
        return len(move(alias, transition, rows, reason=reason, recorded=True, **given))
    (source,) = transition.sources
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(*_statement(connection, transition, source, rows, given))
        return int(cursor.rowcount)


def _by_source(
    connection: BaseDatabaseWrapper, rows: Sequence[int] | Found, sources: Sequence[State]
) -> Mapping[str, Sequence[int] | Found]:
    """The rows by the state they are in. An UPDATE does not tell which of several it was, so these are locked first."""
    if len(sources) == 1:
        return {sources[0].value: rows}
    if isinstance(rows, Found):
        raise TypeError("A query can only be given to a transition with one source.")
    found = OutboxMessage.objects.using(connection.alias).filter(pk__in=rows, state__in=sources).order_by("pk")
    by_source: dict[str, list[int]] = {}
    for position, state in found.select_for_update(no_key=True).values_list("pk", "state"):
        by_source.setdefault(state, []).append(position)
    return by_source


def _statement(
    connection: BaseDatabaseWrapper,
    transition: Transition,
    was: str,
    rows: Sequence[int] | Found,
    given: Mapping[str, Any],
    returning: str = "",
) -> tuple[str, list[Any]]:
    update, written = _update(connection, transition, given)
    if isinstance(rows, Found):
        return f"{update} WHERE {rows.condition(connection)}{returning}", [*written, *rows.parameters]
    condition, parameter = any_of(connection, rows)
    return f"{update} WHERE id {condition} AND state = '{was}'{returning}", [*written, parameter]


def _update(connection: BaseDatabaseWrapper, transition: Transition, given: Mapping[str, Any]) -> tuple[str, Sequence[Any]]:
    """The UPDATE of all columns that the transition writes, without its condition."""
    known = (connection.vendor, transition.name)
    if not given and known in _updates:
        return _updates[known]
    query = UpdateQuery(OutboxMessage)
    state = transition.targets[0].value if transition.state is None else transition.state
    query.add_update_values({"state": state, **transition.columns(**given)})
    update: tuple[str, Sequence[Any]] = query.get_compiler(connection=connection).as_sql()
    if not given:
        _updates[known] = update
    return update


def _record(alias: str, moved: Sequence[Moved], reason: str) -> None:
    by_states: dict[tuple[str, str], list[int]] = {}
    for position, was, became in moved:
        by_states.setdefault((was, became), []).append(position)
    for (was, became), positions in by_states.items():
        record(alias, positions, was=was, became=became, reason=reason)

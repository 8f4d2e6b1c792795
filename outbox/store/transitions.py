"""Executes the transitions that `outbox.states` declares: one guarded statement, and its entries in the trail.

No other code changes the state of a message. The statement is an UPDATE, unless the transition moves the message into history
or out of it: then on PostgreSQL one statement deletes the row from one part of the table and inserts it into another. A
statement that waits for the row then finds no row, as if its guard had found another state. An UPDATE of `day` would also move
the row, but raise an error in the statements that wait for it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections, transaction
from django.db.models import Value
from django.db.models.sql import UpdateQuery

from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.days import LIVE
from exactly_once.sql.prepared_statements import PreparedStatement, numbered
from outbox.models import OutboxMessage
from outbox.states import SETTLED, State, Transition
from outbox.store.dialect import COLUMNS, HISTORY, LIVE_PART, TABLE, any_of, as_uuid, live
from outbox.store.trail import is_recorded, record

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler

_Values = Mapping[str, tuple[str, Sequence[Any]]]
"""The values to write, by column: SQL and its parameters."""
_Write = Callable[[_Values], tuple[str, Sequence[Any]]]

_written: dict[tuple[str, str, _Write], tuple[str, Sequence[Any]]] = {}
"""The compiled values of transitions without parameters, by database vendor and transition: compiling takes as long as
executing."""
_prepared: dict[str, PreparedStatement] = {}


class Found(NamedTuple):
    """The messages to move, as a query that finds messages in the single source state of the transition.

    The query locks the rows, so the UPDATE needs no condition. Its result is an array, because PostgreSQL computes an array
    once. With outdated statistics it may execute a subquery with a LIMIT again for each row of the other side of a join, and
    each time find and lock other rows.

    Attributes:
        query: selects `column`.
        locking: PostgreSQL's locking clause; "" if the query contains it.
    """

    query: str
    parameters: Sequence[Any]
    locking: str = "FOR UPDATE SKIP LOCKED"
    column: str = "id"

    def condition(self, connection: BaseDatabaseWrapper) -> str:
        query = self.locked(connection)
        return f"{self.column} = ANY(ARRAY({query}))" if is_postgresql(connection) else f"{self.column} IN ({query})"

    def locked(self, connection: BaseDatabaseWrapper) -> str:
        return f"{self.query} {self.locking}" if is_postgresql(connection) else self.query


class Moved(NamedTuple):
    """A message that a transition has changed."""

    position: int
    message_id: uuid.UUID
    was: str
    became: str


def move(
    alias: str,
    transition: Transition,
    rows: Sequence[int] | Found,
    *,
    only: Collection[str] | None = None,
    reason: str = "",
    recorded: bool | None = None,
    skip_locked: bool = False,
    **given: Any,
) -> list[Moved]:
    """Apply a transition to those of the messages that are in one of its source states; returns the changed messages.

    It uses the open transaction, or its own. It waits for rows that another transaction has locked, unless a query skips them.

    Args:
        rows: positions, or a query that finds and locks rows.
        only: restricts the source states.
        reason: for the trail: who decided and why.
        recorded: overrides `recorded` of the transition for this execution.
        skip_locked: leave out the positions of rows that another transaction has locked.
        given: the parameters of the transition's columns.
    """
    if not rows:
        return []
    connection = connections[alias]
    sources = [source for source in transition.sources if only is None or source in only]
    # Without a savepoint: after an error the code that opened the transaction rolls all of it back.
    with transaction.atomic(using=alias, savepoint=False), connection.cursor() as cursor:
        moved: list[Moved] = []
        for was, its in _by_source(connection, rows, sources, skip_locked=skip_locked).items():
            cursor.execute(*_statement(connection, transition, was, its, given, " RETURNING id, message_id, state"))
            moved += [Moved(position, as_uuid(name), was, became) for position, name, became in cursor.fetchall()]
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
    """`move` for a transition with one source; the number of changed messages. It reads rows only if the trail needs them."""
    if not rows:
        return 0
    if is_recorded(decision=transition.recorded if recorded is None else recorded):
        return len(move(alias, transition, rows, reason=reason, recorded=True, **given))
    (source,) = transition.sources
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(*_statement(connection, transition, source, rows, given))
        return int(cursor.rowcount)


def move_and_commit(alias: str, transition: Transition, rows: Sequence[int], *, before: Sequence[str]) -> int:
    """Apply a transition with one source and no parameters, and commit; the number of changed rows. It records nothing.

    Args:
        before: statements to execute before it, in the same round trip.
    """
    (source,) = transition.sources
    connection = connections[alias]
    statement, parameters = _statement(connection, transition, source, rows, {})
    prepared = _prepared.get(transition.name)
    if prepared is None:
        name = f"outbox_{transition.name.replace(' ', '_')}"
        prepared = _prepared[transition.name] = PreparedStatement(name, ["unknown"] * len(parameters), numbered(statement))
    return prepared.execute_and_commit(connection, parameters, before=[each.encode() for each in before])


def delete(alias: str, transition: Transition, rows: Sequence[int]) -> int:
    """Delete messages instead of applying a transition with one source; their number. The trail records the transition."""
    (source,) = transition.sources
    (target,) = transition.targets
    connection = connections[alias]
    condition, parameter = any_of(connection, rows)
    statement = f"DELETE FROM {live(connection)} WHERE id {condition} AND state = '{source}'"
    with connection.cursor() as cursor:
        if not is_recorded(decision=transition.recorded):
            cursor.execute(statement, [parameter])
            return int(cursor.rowcount)
        cursor.execute(f"{statement} RETURNING id, message_id", [parameter])
        deleted = [Moved(position, as_uuid(name), source.value, target.value) for position, name in cursor.fetchall()]
    _record(alias, deleted, "")
    return len(deleted)


def _by_source(
    connection: BaseDatabaseWrapper, rows: Sequence[int] | Found, sources: Sequence[State], *, skip_locked: bool
) -> Mapping[str, Sequence[int] | Found]:
    """The rows by their state. With several sources they are locked first: a statement does not return the previous state."""
    if len(sources) == 1 and not skip_locked:
        return {sources[0].value: rows}
    if isinstance(rows, Found):
        raise TypeError("A query can only be given to a transition with one source.")
    found = OutboxMessage.objects.using(connection.alias).filter(pk__in=rows, state__in=sources).order_by("pk")
    if not set(sources) & set(SETTLED):
        found = found.filter(day=LIVE)
    by_source: dict[str, list[int]] = {}
    for position, state in found.select_for_update(skip_locked=skip_locked).values_list("pk", "state"):
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
    moves = is_postgresql(connection) and (was in SETTLED or not set(transition.targets).isdisjoint(SETTLED))
    written, parameters = _what(connection, transition, given, _as_selected if moves else _as_updated)
    if isinstance(rows, Found):
        condition, found = rows.condition(connection), rows.parameters
    else:
        condition, parameter = any_of(connection, rows)
        condition, found = f"id {condition} AND state = '{was}'", [parameter]
    if not moves:
        # The expressions refer to the columns by the name of the whole table.
        return f"UPDATE {live(connection)} AS {TABLE} SET {written} WHERE {condition}{returning}", [*parameters, *found]
    source, target = (TABLE, LIVE_PART) if was in SETTLED else (LIVE_PART, HISTORY)
    return (
        f"WITH {TABLE} AS (DELETE FROM {source} WHERE {condition} RETURNING *) "
        f"INSERT INTO {target} ({', '.join(COLUMNS)}) SELECT {written} FROM {TABLE}{returning}"
    ), [*found, *parameters]


def _what(
    connection: BaseDatabaseWrapper,
    transition: Transition,
    given: Mapping[str, Any],
    write: _Write,
) -> tuple[str, Sequence[Any]]:
    """The values that the transition writes, as SQL and its parameters."""
    known = (connection.vendor, transition.name, write)
    if not given and known in _written:
        return _written[known]
    state = transition.targets[0].value if transition.state is None else transition.state
    values = {"state": state, **transition.columns(**given)}
    if State.READY in transition.targets:
        values["is_secondary"] = True  # the floor of a relay may be above it in the stream
    query = UpdateQuery(OutboxMessage)
    compiler = query.get_compiler(connection=connection)
    written = write({name: _value(query, compiler, name, value) for name, value in values.items()})
    if not given:
        _written[known] = written
    return written


def _value(query: UpdateQuery, compiler: SQLCompiler, name: str, value: Any) -> tuple[str, Sequence[Any]]:
    """An expression, or a plain value of the column's type."""
    if not hasattr(value, "resolve_expression"):
        field: Any = OutboxMessage._meta.get_field(name)
        value = Value(value, output_field=field)
    sql, parameters = compiler.compile(value.resolve_expression(query, allow_joins=False, for_save=True))
    return sql, parameters


def _as_updated(values: _Values) -> tuple[str, Sequence[Any]]:
    """For an UPDATE: only the written columns."""
    return (
        ", ".join(f"{name} = {sql}" for name, (sql, _) in values.items()),
        [parameter for _, parameters in values.values() for parameter in parameters],
    )


def _as_selected(values: _Values) -> tuple[str, Sequence[Any]]:
    """For an INSERT: all columns."""
    chosen = [values.get(name, (name, ())) for name in COLUMNS]
    return ", ".join(sql for sql, _ in chosen), [parameter for _, parameters in chosen for parameter in parameters]


def _record(alias: str, moved: Sequence[Moved], reason: str) -> None:
    by_states: dict[tuple[str, str], list[uuid.UUID]] = {}
    for _, message_id, was, became in sorted(moved):
        by_states.setdefault((was, became), []).append(message_id)
    for (was, became), message_ids in by_states.items():
        record(alias, message_ids, was=was, became=became, reason=reason)

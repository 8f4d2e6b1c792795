"""Executes the transitions that `outbox.states` declares: one guarded statement, and its entries in the trail.

No other code changes the state of a message. The statement is an UPDATE, unless the transition moves the message into history
or out of it: then on PostgreSQL one statement deletes the row from one part of the table and inserts it into another. A
statement that waits for the row then finds no row, as if its guard had found another state. An UPDATE of `day` would also move
the row, but raise an error in the statements that wait for it.

An entry of the trail is written in the transaction of its transition, after it, while the row is still locked. So an entry
exists if and only if the transition was committed, even if the process was killed a moment later.
"""

import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.sql.connections import execute, fetch, is_postgresql
from exactly_once.sql.days import DAY_OF_NOW, LIVE
from exactly_once.sql.now import NOW, now, now_after
from exactly_once.sql.partitions import days_by
from exactly_once.sql.prepared_statements import PreparedStatement, numbered, run_and_commit
from exactly_once.states import Transition
from exactly_once.wire.envelope import BY_OPERATOR, REPLAY_HEADER
from exactly_once.wire.identity import process_name
from exactly_once.wire.text import ERROR_LENGTH, NAME_LENGTH, printable
from outbox.conf import outbox_options
from outbox.models import OutboxMessage, TrailEntry
from outbox.states import GIVEN_UP, SETTLED, State
from outbox.store.dialect import COLUMNS, DRAWN, HISTORY, LIVE_PART, TABLE, any_of, as_uuid, live, some_uuids
from outbox.store.unique import give_up_names

_PARAMETER = re.compile(r"\{(\w+)\}")
# The seconds from due to expiry, which stay the same. A restored message is due later than its columns say: it has them in the
# header of a replay.
_LIFETIME = {
    "postgresql": f"CASE jsonb_typeof(headers -> '{REPLAY_HEADER}') WHEN 'number' "
    f"THEN CAST(headers ->> '{REPLAY_HEADER}' AS float8) "
    "ELSE CAST(EXTRACT(EPOCH FROM expires_at - COALESCE(deliver_at, created_at)) AS float8) END",
    "sqlite": f"CASE WHEN json_type(headers, '$.\"{REPLAY_HEADER}\"') IN ('real', 'integer') "
    f"THEN json_extract(headers, '$.\"{REPLAY_HEADER}\"') "
    "ELSE round(86400 * (julianday(expires_at) - julianday(COALESCE(deliver_at, created_at))), 3) END",
}
_EXPIRY = {
    "postgresql": f"{{due}} + make_interval(secs => {_LIFETIME['postgresql']})",
    "sqlite": f"STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', {{due}}, ({_LIFETIME['sqlite']}) || ' seconds')",
}
_OF_A_REPLAY = {
    # Publishers cannot set this header. Headers that are not an object were damaged by hand, and are unchanged.
    "postgresql": "CASE jsonb_typeof(headers) WHEN 'object' THEN headers || "
    f"jsonb_build_object('{REPLAY_HEADER}'::text, COALESCE(to_jsonb({_LIFETIME['postgresql']}), '\"{BY_OPERATOR}\"')) "
    "ELSE headers END",
    "sqlite": "CASE json_type(headers) WHEN 'object' "
    f"THEN json_set(headers, '$.\"{REPLAY_HEADER}\"', COALESCE({_LIFETIME['sqlite']}, '{BY_OPERATOR}')) ELSE headers END",
}
_EXPRESSIONS = {
    vendor: {
        "{expiry_after_due}": expiry,
        "{expiry_after_now}": expiry.replace("{due}", NOW[vendor]),
        "{headers_of_a_replay}": _OF_A_REPLAY[vendor],
        "{now}": NOW[vendor],
        # In a subquery, so that it is computed once and not for each row.
        "{today}": f"(SELECT {DAY_OF_NOW[vendor]})",
    }
    for vendor, expiry in _EXPIRY.items()
}
_prepared: dict[str, PreparedStatement] = {}


class Found(NamedTuple):
    """The messages to move, as a query that finds messages in the single source state of the transition.

    The query, or an earlier one of the transaction, locks the rows, so the UPDATE needs no condition. Its result is an array,
    because PostgreSQL computes an array once. With outdated statistics it may execute a subquery with a LIMIT again for each
    row of the other side of a join, and each time find and lock other rows.

    Attributes:
        query: selects `column`.
        locking: PostgreSQL's locking clause; "" if the query contains it, or an earlier one has locked the rows.
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
    """A message that a transition has changed, and its day since."""

    position: int
    message_id: uuid.UUID
    was: str
    became: str
    day: int


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
    sources = [str(source) for source in transition.sources if only is None or source in only]
    # Without a savepoint: after an error the code that opened the transaction rolls all of it back.
    with transaction.atomic(using=alias, savepoint=False):
        moved: list[Moved] = []
        days = _days(alias, rows, sources)
        for was, its in _by_source(connection, rows, sources, days, skip_locked=skip_locked).items():
            statement = _statement(connection, transition, was, its, given, " RETURNING id, message_id, state, day", days=days)
            changed = fetch(connection, *statement)
            moved += [Moved(position, as_uuid(name), was, became, day) for position, name, became, day in changed]
        if moved and not set(transition.targets).isdisjoint(GIVEN_UP):
            give_up_names(alias, [one.message_id for one in moved])
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
    """`move` for a transition with one source that gives no message up; the number of changed messages.

    It reads rows only if the trail needs them.
    """
    if not rows:
        return 0
    if is_recorded(decision=transition.recorded if recorded is None else recorded):
        return len(move(alias, transition, rows, reason=reason, recorded=True, **given))
    (source,) = transition.sources
    connection = connections[alias]
    return execute(connection, *_statement(connection, transition, source, rows, given))


def move_and_commit(alias: str, transition: Transition, rows: Found, *, before: Sequence[str]) -> int:
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
    (result,), _ = run_and_commit(connection, [(prepared, parameters)], before=[each.encode() for each in before])
    return int(result.command_tuples or 0)


def delete(alias: str, transition: Transition, rows: Sequence[int], *, unless: tuple[str, Sequence[Any]]) -> int:
    """Delete messages instead of applying a transition with one source; their number. The trail records the transition.

    Args:
        unless: the condition of a message `m` that is not deleted, and its parameters.
    """
    (source,) = transition.sources
    (target,) = transition.targets
    connection = connections[alias]
    condition, parameter = any_of(connection, rows)
    stays, parameters = unless
    statement = f"DELETE FROM {live(connection)} AS m WHERE m.id {condition} AND m.state = '{source}' AND NOT ({stays})"
    if not is_recorded(decision=transition.recorded):
        return execute(connection, statement, [parameter, *parameters])
    deleted = fetch(connection, f"{statement} RETURNING message_id", [parameter, *parameters])
    record(alias, [as_uuid(name) for (name,) in deleted], was=source.value, became=target.value, reason="")
    return len(deleted)


def _days(alias: str, rows: Sequence[int] | Found, sources: Collection[str]) -> Collection[int]:
    """The days of messages of which some may be settled."""
    if isinstance(rows, Found) or not set(sources) & set(SETTLED):
        return (LIVE,)
    # History has no index of the positions of published messages.
    messages = OutboxMessage.objects.using(alias).exclude(state__in={State.PUBLISHED} - {*sources})
    return {LIVE, *days_by(messages, "pk", rows).values()}


def _by_source(
    connection: BaseDatabaseWrapper,
    rows: Sequence[int] | Found,
    sources: Sequence[str],
    days: Collection[int],
    *,
    skip_locked: bool,
) -> Mapping[str, Sequence[int] | Found]:
    """The rows by their state. With several sources they are locked first: a statement does not return the previous state."""
    if len(sources) == 1 and not skip_locked:
        return {sources[0]: rows}
    if isinstance(rows, Found):
        raise TypeError("A query can only be given to a transition with one source.")
    found = OutboxMessage.objects.using(connection.alias).filter(pk__in=rows, state__in=sources, day__in=days).order_by("pk")
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
    days: Collection[int] = (LIVE,),
) -> tuple[str, list[Any]]:
    if isinstance(rows, Found):
        condition, found = rows.condition(connection), rows.parameters
    else:
        condition, parameter = any_of(connection, rows)
        condition, found = f"id {condition} AND state = '{was}'", [parameter]
        if was in SETTLED:
            condition = f"{condition} AND day IN ({', '.join(map(str, days))})"
    values = _values(connection, transition)
    if not (is_postgresql(connection) and (was in SETTLED or not set(transition.targets).isdisjoint(SETTLED))):
        written, parameters = _with_given(connection, ", ".join(f"{name} = {sql}" for name, sql in values.items()), given)
        return f"UPDATE {live(connection)} SET {written} WHERE {condition}{returning}", [*parameters, *found]
    written, parameters = _with_given(connection, ", ".join(values.get(name, name) for name in COLUMNS), given)
    source, target = (TABLE, LIVE_PART) if was in SETTLED else (LIVE_PART, HISTORY)
    return (
        f"WITH moved AS (DELETE FROM {source} WHERE {condition} RETURNING *) "
        f"INSERT INTO {target} ({', '.join(COLUMNS)}) SELECT {written} FROM moved{returning}"
    ), [*found, *parameters]


def _values(connection: BaseDatabaseWrapper, transition: Transition) -> dict[str, str]:
    """What the transition writes, by column: SQL with its parameters in braces."""
    values = {"state": f"'{transition.targets[0]}'", **transition.sets}
    if State.READY in transition.targets:
        values["ready_position"] = DRAWN[connection.vendor]  # the floor of a relay may be above it in the stream
    for name, expression in _EXPRESSIONS[connection.vendor].items():
        values = {column: sql.replace(name, expression) for column, sql in values.items()}
    return values


def _with_given(connection: BaseDatabaseWrapper, sql: str, given: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The SQL with placeholders, and its parameters. A duration becomes the instant after it."""
    values = [given[name] for name in _PARAMETER.findall(sql)]
    placeholders = [now_after(connection) if isinstance(value, timedelta) else "%s" for value in values]
    return _PARAMETER.sub(lambda found: placeholders.pop(0), sql), [_adapted(connection, value) for value in values]


def _adapted(connection: BaseDatabaseWrapper, value: Any) -> Any:
    if isinstance(value, datetime):
        return connection.ops.adapt_datetimefield_value(value)
    return value.total_seconds() if isinstance(value, timedelta) else value


def _record(alias: str, moved: Sequence[Moved], reason: str) -> None:
    by_states: dict[tuple[str, str], list[uuid.UUID]] = {}
    for one in sorted(moved):
        by_states.setdefault((one.was, one.became), []).append(one.message_id)
    for (was, became), message_ids in by_states.items():
        record(alias, message_ids, was=was, became=became, reason=reason)


def is_recorded(*, decision: bool) -> bool:
    """Are such transitions recorded? Decisions, which matter to an operator, always are; others if TRAIL is "all"."""
    return decision or outbox_options().TRAIL == "all"


def record(alias: str, message_ids: Sequence[uuid.UUID], *, was: str, became: str, reason: str) -> None:
    """Record in the open transaction that these messages changed from one state to another.

    Args:
        was: "" for new messages.
        reason: human-readable; "" if the states are explanation enough.
    """
    if not message_ids:
        return
    connection = connections[alias]
    ids, parameter = some_uuids(connection, message_ids)
    execute(
        connection,
        f"INSERT INTO {TrailEntry._meta.db_table} (message_id, was, became, at, process, reason) "
        f"SELECT id, %s, %s, {now(connection)}, %s, %s FROM {ids}",
        [was, became, process_name()[:NAME_LENGTH], printable(reason, ERROR_LENGTH), parameter],
    )

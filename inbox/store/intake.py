"""Storing deliveries that are not handled now, in their order, many with one statement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import connections

from inbox.models import State
from inbox.store.arrivals import count_duplicate
from inbox.store.dialect import TABLE, adapted, fetch_all
from inbox.store.failures import refused_now
from inbox.store.ordering import OPEN, hold_gates, promote_next
from inbox.store.rows import COLUMNS, Earlier, NewRow, locked_means_busy
from inbox.store.together import IN_JSON, VALUES, as_json, rows_of
from inbox.store.trail import record
from outbox.database.connections import is_postgresql
from outbox.database.now import now
from outbox.kernel.text import ERROR_LENGTH, printable

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


@dataclass(frozen=True, kw_only=True, slots=True)
class Incoming:
    """A delivery to be stored.

    Attributes:
        in_order: its handler is ordered, so if it has a key, it gets a place in the order of that key.
        refused: why it is a dead letter from the start, or "".
        shed: why it is not handled at all, or "".
        quarantined: it is refused by the maximum message age, see `operating.override_maximum_age`.
        redelivered: the broker says that it has delivered this message before.
    """

    row: NewRow
    in_order: bool = False
    refused: str = ""
    shed: str = ""
    quarantined: bool = False
    redelivered: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """The outcome of storing it.

    Attributes:
        state: the state that it was stored in; "" if it is a duplicate.
        earlier: the row of a duplicate; None if that row is being run now, so that it could not be counted.
    """

    state: str = ""
    earlier: Earlier | None = None


_Stored = dict[str, tuple[str, int]]
"""By biz-id, the state that a delivery was stored in, and its row."""


@dataclass(frozen=True, slots=True)
class _Place:
    """One delivery: does it have a place in an order, and is it the first of its key here?"""

    given: Incoming
    ordered: bool
    leads: bool


def store_incoming(alias: str, incoming: Sequence[Incoming], *, dead_blocks: bool) -> list[Taken]:
    """∅ → received, due now; ∅ → waiting, in order and behind another of its key; ∅ → dead if refused; ∅ → shed.

    For deliveries of one handler, in their order, inside a transaction of `ordering.deciding` or one like it. With
    `dead_blocks`, a refused one keeps its place until an operator decides; otherwise it has none.

    Raises:
        ConcurrentDuplicate: another transaction held a lock for longer than this one's lock_timeout. Roll back and try again.
    """
    if not incoming:
        return []
    handler = incoming[0].row.handler
    places = _places(incoming, dead_blocks=dead_blocks)
    with locked_means_busy():
        hold_gates(alias, handler, [given.row.key for given in incoming if given.in_order])
        stored = (_insert_all if is_postgresql(connections[alias]) else _insert_each)(connections[alias], places)
    _record(alias, incoming, stored)
    taken = [_taken(alias, given, *stored.pop(given.row.biz_id, ("", 0))) for given in incoming]
    for key in _headless(places, taken):
        promote_next(alias, handler, key)
    return taken


def _places(incoming: Sequence[Incoming], *, dead_blocks: bool) -> list[_Place]:
    seen: set[str] = set()
    places = []
    for given in incoming:
        ordered = given.in_order and bool(given.row.key) and (dead_blocks or not given.refused)
        places.append(_Place(given, ordered, given.row.key not in seen))
        if ordered:
            seen.add(given.row.key)
    return places


def _record(alias: str, incoming: Sequence[Incoming], stored: _Stored) -> None:
    """Deliveries that are not handled matter, each with its reason."""
    first: dict[str, Incoming] = {}
    for given in incoming:
        first.setdefault(given.row.biz_id, given)
    reasons: dict[str, list[int]] = {}
    for biz_id, (_, row) in stored.items():
        reasons.setdefault(first[biz_id].refused or first[biz_id].shed, []).append(row)
    for reason, rows in reasons.items():
        record(alias, rows, was="", reason=reason, matters=bool(reason))


def _taken(alias: str, given: Incoming, state: str, _row: int) -> Taken:
    # Of two copies in one batch, the first was inserted, and the second is its duplicate.
    return Taken(state) if state else Taken(earlier=count_duplicate(alias, given.row, redelivered=given.redelivered))


def _headless(places: Sequence[_Place], taken: Sequence[Taken]) -> list[str]:
    """Keys whose first delivery here was a duplicate, so that the next one, stored as waiting, may be the head."""
    missing = {place.given.row.key for place, one in zip(places, taken, strict=True) if place.leads and not one.state}
    waiting = {place.given.row.key for place, one in zip(places, taken, strict=True) if one.state == State.WAITING}
    return sorted(missing & waiting)


def _insert_all(connection: BaseDatabaseWrapper, places: Sequence[_Place]) -> _Stored:
    """One statement, see `together`; its rows are numbered in their order.

    Rows that exist are excluded before the unique index is checked, which would wait for the end of a handler that is running
    the row. The statement still waits for a concurrent duplicate that is being inserted.
    """
    columns = {
        **IN_JSON,
        "settled_as": "text",
        "ordered": "boolean",
        "leads": "boolean",
        "quarantined": "boolean",
        "reason": "text",
    }
    state = _state_of("given.settled_as", "given.handler", "given.key", "given.ordered", "NOT given.leads")
    sql = (
        f"INSERT INTO {TABLE} ({_columns()}) "
        f"SELECT {VALUES}, ordered, quarantined, reason, state, {_times('state', connection)} "
        f"FROM (SELECT given.*, {state} AS state FROM {rows_of(columns, connection)} WITH ORDINALITY "
        f"AS given({', '.join(columns)}, body, number)) given WHERE NOT EXISTS (SELECT 1 FROM {TABLE} m "
        "WHERE m.handler = given.handler AND m.topic = given.topic AND m.biz_id = given.biz_id) "
        "ORDER BY number ON CONFLICT (handler, topic, biz_id) DO NOTHING RETURNING biz_id, state, id"
    )
    parameters = [json.dumps([_as_json(place) for place in places]), [place.given.row.body for place in places]]
    return {biz_id: (state, row) for biz_id, state, row in fetch_all(connection, sql, parameters)}


def _insert_each(connection: BaseDatabaseWrapper, places: Sequence[_Place]) -> _Stored:
    """SQLite: there is no round trip to save, and each statement sees the rows before it."""
    stored: _Stored = {}
    for place in places:
        row = place.given.row
        state = _state_of("%s", "%s", "%s", "%s", "%s")
        sql = (
            f"INSERT INTO {TABLE} ({_columns()}) SELECT {', '.join(['%s'] * len(COLUMNS))}, %s, %s, %s, state, "
            f"{_times('state', connection)} FROM (SELECT {state} AS state) WHERE true "
            "ON CONFLICT (handler, topic, biz_id) DO NOTHING RETURNING state, id"
        )
        with connection.cursor() as cursor:
            cursor.execute(
                sql,
                [
                    *(adapted(connection, getattr(row, column)) for column in COLUMNS),
                    place.ordered,
                    place.given.quarantined,
                    _reason(place),
                    *[_settled_as(place)] * 2,
                    place.ordered,
                    False,
                    row.handler,
                    row.key,
                ],
            )
            for found, pk in cursor.fetchall():
                stored[row.biz_id] = found, pk
    return stored


def _state_of(settled_as: str, handler: str, key: str, ordered: str, behind: str) -> str:
    return (
        f"CASE WHEN {settled_as} <> '' THEN {settled_as} WHEN NOT {ordered} THEN 'received' WHEN {behind} OR EXISTS "
        f"(SELECT 1 FROM {TABLE} m WHERE m.handler = {handler} AND m.key = {key} AND {OPEN.replace('ordered', 'm.ordered')}) "
        "THEN 'waiting' ELSE 'received' END"
    )


def _settled_as(place: _Place) -> str:
    """The state of a delivery that must not be handled; "" for any other."""
    if place.given.refused:
        return State.DEAD.value
    return State.SHED.value if place.given.shed else ""


def _columns() -> str:
    return (
        f"{', '.join(COLUMNS)}, ordered, quarantined, last_error, state, "
        "received_at, settled_at, next_attempt_at, error_class, failing_since, failed_at"
    )


def _times(state: str, connection: BaseDatabaseWrapper) -> str:
    at = now(connection)
    due = f"CASE WHEN {state} = 'received' THEN {at} END"
    return f"{at}, CASE WHEN {state} IN ('dead', 'shed') THEN {at} END, {due}, {refused_now(state, at)}"


def _as_json(place: _Place) -> dict[str, Any]:
    return {
        **as_json(place.given.row),
        "ordered": place.ordered,
        "leads": place.leads,
        "quarantined": place.given.quarantined,
        "settled_as": _settled_as(place),
        "reason": _reason(place),
    }


def _reason(place: _Place) -> str:
    return printable(place.given.refused or place.given.shed, ERROR_LENGTH)

"""The trail: the transitions of a message in a handler, each with its time, process and reason.

An entry is written in the transaction of its transition, on a row that this transaction has locked. So an entry exists if and
only if the transition was committed, even if the process was killed a moment later.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from django.db import connections, transaction

from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.now import now
from exactly_once.wire.identity import process_name
from exactly_once.wire.text import ERROR_LENGTH, NAME_LENGTH, printable
from inbox.conf import inbox_options
from inbox.models import TrailEntry
from inbox.store.dialect import TABLE

_TRAIL = TrailEntry._meta.db_table


def is_recorded(*, matters: bool) -> bool:
    """Are such transitions recorded? Those that do not matter to people only with `INBOX["TRAIL"] = "all"`."""
    return matters or inbox_options().TRAIL == "all"


def recording(alias: str, *, matters: bool) -> AbstractContextManager[Any]:
    """A transaction for a transition and its entry. Without an entry, the single statement needs no transaction."""
    return transaction.atomic(using=alias) if is_recorded(matters=matters) else nullcontext()


def record(alias: str, rows: Sequence[int], *, was: str, reason: str = "", matters: bool = True) -> None:
    """Record a transition after it was made: from the state `was` to the state in their rows.

    Args:
        was: "" if the row was inserted.
        reason: for people; "" if the states explain it.
        matters: see `is_recorded`.
    """
    if rows and is_recorded(matters=matters):
        places = ", ".join(["%s"] * len(rows))
        _write(alias, "%s", "state", f"id IN ({places})", [str(was)], list(rows), reason)


def record_leaving(
    alias: str, condition: str, parameters: Sequence[Any], *, became: str, reason: str = "", matters: bool = True
) -> int:
    """Record a transition before it is made: of the rows that match `condition`, from their states to `became`.

    The rows are locked, so that they do not change before the transition. Returns their number, or 0 if nothing was recorded.
    """
    if not is_recorded(matters=matters):
        return 0
    lock = "FOR UPDATE" if is_postgresql(connections[alias]) else ""
    return _write(alias, "state", "%s", condition, [str(became)], parameters, reason, lock)


def _write(
    alias: str,
    was: str,
    became: str,
    condition: str,
    state: Sequence[str],
    parameters: Sequence[Any],
    reason: str,
    lock: str = "",
) -> int:
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {_TRAIL} (message_id, handler, was, became, at, process, reason) "
            f"SELECT message_id, handler, {was}, {became}, {now(connection)}, %s, %s FROM {TABLE} WHERE {condition} {lock}",
            [*state, process_name()[:NAME_LENGTH], printable(reason, ERROR_LENGTH), *parameters],
        )
        return int(cursor.rowcount)

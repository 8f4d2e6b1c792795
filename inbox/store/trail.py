"""The trail: which transition a message went through in a handler, when, in whose hands and why.

An entry is written in the transaction of its transition, on a row that this transaction has locked. So there is an entry if and
only if the transition was committed, also for a process that was killed a moment later.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from django.db import connections, transaction

from inbox.conf import inbox_options
from inbox.models import TrailEntry
from inbox.store.dialect import TABLE
from outbox.database.connections import is_postgresql
from outbox.database.now import now
from outbox.kernel.identity import process_name
from outbox.kernel.text import ERROR_LENGTH, NAME_LENGTH, printable

_TRAIL = TrailEntry._meta.db_table


def is_noted(*, matters: bool) -> bool:
    """Do transitions leave a trail: those that matter to a person, or those that do not?"""
    return matters or inbox_options().TRAIL == "all"


def noting(alias: str, *, matters: bool) -> AbstractContextManager[Any]:
    """A transaction for a transition with its entry. What leaves none needs none: its one statement is one."""
    return transaction.atomic(using=alias) if is_noted(matters=matters) else nullcontext()


def note(alias: str, rows: Sequence[int], *, was: str, reason: str = "", matters: bool = True) -> None:
    """After a transition: these messages were in one state, and are in the one that their rows tell.

    Args:
        was: "" when the row was inserted.
        reason: for people; "" when the states say it.
        matters: to a person. What does not is written only with `INBOX["TRAIL"] = "all"`.
    """
    if rows and is_noted(matters=matters):
        places = ", ".join(["%s"] * len(rows))
        _write(alias, "%s", "state", f"id IN ({places})", [str(was)], list(rows), reason)


def note_leaving(
    alias: str, condition: str, parameters: Sequence[Any], *, became: str, reason: str = "", matters: bool = True
) -> int:
    """Before a transition of the rows of which `condition` is true: what they were, and what they are about to be.

    They are locked, so that the transition finds them as they were here; how many they are, or none if nothing was noted.
    """
    if not is_noted(matters=matters):
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

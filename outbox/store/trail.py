"""The trail: which transition a message went through, when, in whose hands and why.

An entry is written in the transaction of its transition, after it, while the row is still locked by it. So there is an entry
if and only if the transition was committed, also for a process that was killed a moment later.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections

from outbox.conf import outbox_options
from outbox.database.now import now
from outbox.kernel.identity import process_name
from outbox.kernel.text import ERROR_LENGTH, NAME_LENGTH, printable
from outbox.models import TrailEntry
from outbox.store.dialect import TABLE, any_of

_TRAIL = TrailEntry._meta.db_table


def is_recorded(*, decision: bool) -> bool:
    """Are transitions written to the trail: decisions, which matter to a person, or all others?"""
    return decision or outbox_options().TRAIL == "all"


def record(alias: str, positions: Sequence[int], *, was: str, became: str, reason: str) -> None:
    """Write, in the open transaction, that these messages were in one state and are in another now.

    To be called after each transition, with the positions of the rows that it has changed, and before their next one.

    Args:
        reason: for people; "" when the states say it.
    """
    _write(alias, positions, was, became, reason)


def record_insert(alias: str, positions: Sequence[int]) -> None:
    """Write, in the open transaction, that these messages are there now, in the state in which they are.

    It is no decision: their rows tell it as long as they are kept.
    """
    if is_recorded(decision=False):
        _write(alias, positions, "", None, "")


def _write(alias: str, positions: Sequence[int], was: str, became: str | None, reason: str) -> None:
    if not positions:
        return
    connection = connections[alias]
    condition, parameter = any_of(connection, positions)
    told = [was, process_name()[:NAME_LENGTH], printable(reason, ERROR_LENGTH), parameter]
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {_TRAIL} (message_id, was, became, at, process, reason) "
            f"SELECT message_id, %s, state, {now(connection)}, %s, %s FROM {TABLE} WHERE id {condition} "
            f"{'' if became is None else 'AND state = %s '}ORDER BY id",
            told if became is None else [*told, became],
        )

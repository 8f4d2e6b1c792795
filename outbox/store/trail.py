"""The trail: a message's transitions, each with its instant, its process and its reason.

An entry is written in the transaction of its transition, after it, while the row is still locked. So an entry exists if and
only if the transition was committed, even if the process was killed a moment later.
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
    """Are such transitions recorded? Decisions, which matter to an operator, always are; others if TRAIL is "all"."""
    return decision or outbox_options().TRAIL == "all"


def record(alias: str, positions: Sequence[int], *, was: str, became: str, reason: str) -> None:
    """Record in the open transaction that these messages changed from one state to another.

    Call it after each transition, with the positions of the changed rows, and before their next transition.

    Args:
        reason: human-readable; "" if the states are explanation enough.
    """
    _write(alias, positions, was, became, reason)


def record_insert(alias: str, positions: Sequence[int]) -> None:
    """Record in the open transaction that these messages were inserted, with their present state.

    It is not a decision, because the rows show it as long as they exist.
    """
    if is_recorded(decision=False):
        _write(alias, positions, "", None, "")


def _write(alias: str, positions: Sequence[int], was: str, became: str | None, reason: str) -> None:
    if not positions:
        return
    connection = connections[alias]
    condition, parameter = any_of(connection, positions)
    parameters = [was, process_name()[:NAME_LENGTH], printable(reason, ERROR_LENGTH), parameter]
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {_TRAIL} (message_id, was, became, at, process, reason) "
            f"SELECT message_id, %s, state, {now(connection)}, %s, %s FROM {TABLE} WHERE id {condition} "
            f"{'' if became is None else 'AND state = %s '}ORDER BY id",
            parameters if became is None else [*parameters, became],
        )

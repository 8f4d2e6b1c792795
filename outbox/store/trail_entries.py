"""The trail: a message's transitions, each with its instant, its process and its reason.

An entry is written in the transaction of its transition, after it, while the row is still locked. So an entry exists if and
only if the transition was committed, even if the process was killed a moment later.
"""

import uuid
from collections.abc import Sequence

from django.db import connections

from exactly_once.sql.now import now
from exactly_once.wire.identity import process_name
from exactly_once.wire.text import ERROR_LENGTH, NAME_LENGTH, printable
from outbox.conf import outbox_options
from outbox.models import TrailEntry
from outbox.store.dialect import any_of, live, some_uuids

_TRAIL = TrailEntry._meta.db_table


def is_recorded(*, decision: bool) -> bool:
    """Are such transitions recorded? Decisions, which matter to an operator, always are; others if TRAIL is "all"."""
    return decision or outbox_options().TRAIL == "all"


def record(alias: str, message_ids: Sequence[uuid.UUID], *, was: str, became: str, reason: str) -> None:
    """Record in the open transaction that these messages changed from one state to another.

    Args:
        reason: human-readable; "" if the states are explanation enough.
    """
    if not message_ids:
        return
    connection = connections[alias]
    ids, parameter = some_uuids(connection, message_ids)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {_TRAIL} (message_id, was, became, at, process, reason) "
            f"SELECT id, %s, %s, {now(connection)}, %s, %s FROM {ids}",
            [was, became, *_by(reason), parameter],
        )


def record_insert(alias: str, positions: Sequence[int]) -> None:
    """Record in the open transaction that these messages were inserted, with their present state.

    It is not a decision, because the rows show it as long as they exist.
    """
    if not positions or not is_recorded(decision=False):
        return
    connection = connections[alias]
    condition, parameter = any_of(connection, positions)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {_TRAIL} (message_id, was, became, at, process, reason) "
            f"SELECT message_id, '', state, {now(connection)}, %s, %s FROM {live(connection)} WHERE id {condition} ORDER BY id",
            [*_by(""), parameter],
        )


def _by(reason: str) -> tuple[str, str]:
    return process_name()[:NAME_LENGTH], printable(reason, ERROR_LENGTH)

"""The trail: which transition a message went through, when, in whose hands and why.

An entry is written in the transaction of its transition, after it, while the row is still locked by it. So there is an entry
if and only if the transition was committed, also for a process that was killed a moment later.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections

from outbox.conf import outbox_options
from outbox.kernel.identity import process_name
from outbox.kernel.text import ERROR_LENGTH, NAME_LENGTH, printable
from outbox.models import TrailEntry
from outbox.store.dialect import TABLE, any_of, now

_TRAIL = TrailEntry._meta.db_table


def note(alias: str, positions: Sequence[int], *, was: str, became: str, reason: str = "", matters: bool = True) -> None:
    """Write, in the open transaction, that these messages were in one state and are in another now.

    Args:
        reason: for people; "" when the states say it.
        matters: to a person. What does not is written only with `OUTBOX["TRAIL"] = "all"`.
    """
    if not positions or not (matters or outbox_options().TRAIL == "all"):
        return
    connection = connections[alias]
    condition, parameter = any_of(connection, positions)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {_TRAIL} (message_id, was, became, at, process, reason) "
            f"SELECT message_id, %s, %s, {now(connection)}, %s, %s FROM {TABLE} "
            f"WHERE id {condition} AND state = %s ORDER BY id",
            # As text: psycopg writes an enum by its name.
            [str(was), str(became), process_name()[:NAME_LENGTH], printable(reason, ERROR_LENGTH), parameter, str(became)],
        )

"""The trail: the transitions of a message in a handler, each with its time, process and reason.

An entry is written in the transaction of its transition, on a row that this transaction has locked. So an entry exists if and
only if the transition was committed, even if the process was killed a moment later.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import connections, transaction
from django.db.models.sql import UpdateQuery

from exactly_once.sql.connections import execute, is_postgresql
from exactly_once.sql.days import LIVE
from exactly_once.sql.now import now
from exactly_once.sql.partitions import days_by, lately
from exactly_once.sql.prepared_statements import execute_script
from exactly_once.wire.identity import process_name
from exactly_once.wire.text import ERROR_LENGTH, NAME_LENGTH, printable
from inbox import deaths
from inbox.conf import inbox_options
from inbox.models import InboxMessage, TrailEntry
from inbox.states import State
from inbox.store.dead_letters import report
from inbox.store.dialect import TABLE

ENTRY = f"INSERT INTO {TrailEntry._meta.db_table} (message_id, handler, was, became, at, process, reason)"


def this_process() -> str:
    return process_name()[:NAME_LENGTH]


def update(
    alias: str,
    rows: Any,
    columns: Mapping[str, Any],
    *,
    was: str,
    reason: str = "",
    matters: bool = True,
    script: str = "",
    commit: bool = False,
) -> int:
    """Make a transition of these rows, a query, from the state `was`, and record it; returns their number.

    On PostgreSQL it is one statement, unless it is a death that is reported, which has no `script`.

    Args:
        reason, matters: see `record`.
        script: statements that are run before it, in the same round trip and transaction; see `execute_script`.
        commit: also commit in that round trip; then the number is not known.
    """
    connection = connections[alias]
    query = rows.query.chain(UpdateQuery)
    query.add_update_values(columns)
    sql, given = query.get_compiler(alias).as_sql()
    sql = f"{sql} RETURNING id, message_id, handler, state"
    is_reported = deaths.reported and columns.get("state") == State.DEAD
    if is_reported or not is_postgresql(connection):
        with transaction.atomic(using=alias), connection.cursor() as cursor:
            cursor.execute(sql, given)
            changed = [row for row, *_ in cursor.fetchall()]
            record(alias, changed, was=was, reason=reason, matters=matters)
            if is_reported:
                report(alias, changed)
            return len(changed)
    if matters or inbox_options().records_all:
        entries = f"SELECT message_id, handler, %s, state, {now(connection)}, %s, %s FROM changed RETURNING id"
        sql = f"WITH changed AS ({sql}) {ENTRY} {entries}"
        given = (*given, str(was), this_process(), printable(reason, ERROR_LENGTH))
    if script:
        return len(execute_script(connection, script, sql, given, commit=commit))
    return execute(connection, sql, given)


def record(alias: str, rows: Sequence[int], *, was: str, reason: str = "", matters: bool = True) -> None:
    """Record a transition after it was made: from the state `was` to the state in their rows.

    Args:
        was: "" if the row was inserted.
        reason: for people; "" if the states explain it.
        matters: if it does not matter to people, it is recorded only with `INBOX["TRAIL"] = "all"`.
    """
    if not rows or not (matters or inbox_options().records_all):
        return
    connection, places = connections[alias], ", ".join(["%s"] * len(rows))
    # A transition makes a message open, or settles it now.
    found = days_by(InboxMessage.objects.using(alias), "pk", rows, lately())
    days = ", ".join(map(str, {LIVE, *found.values()}))
    with connection.cursor() as cursor:
        cursor.execute(
            f"{ENTRY} SELECT message_id, handler, %s, state, {now(connection)}, %s, %s FROM {TABLE} "
            f"WHERE day IN ({days}) AND id IN ({places})",
            [str(was), this_process(), printable(reason, ERROR_LENGTH), *rows],
        )

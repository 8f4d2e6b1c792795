"""The results of a message's named steps, so that a retry does not take them again.

A result of SQL's NULL means that the step was begun and its outcome is unknown. JSON's null is an ordinary result.
"""

from collections.abc import Mapping

from django.db import connections

from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.now import now
from inbox.models import Step
from inbox.store.dialect import TABLE

STEPS = Step._meta.db_table
_WRITE = "ON CONFLICT (message_id, name) DO UPDATE SET result = excluded.result, taken_at = excluded.taken_at"


def steps_of(alias: str, row: int) -> dict[str, str | None]:
    """The results of its steps as JSON, by name; None for one that was begun."""
    with connections[alias].cursor() as cursor:
        # As text, because decoding jsonb would turn both null and NULL into None.
        as_text = "result::text" if is_postgresql(connections[alias]) else "result"
        cursor.execute(f"SELECT name, {as_text} FROM {STEPS} WHERE message_id = %s", [row])
        return dict(cursor.fetchall())


def remember(alias: str, row: int, fence: int, step: str, result: str | None) -> bool:
    """Store the result of a step, or with None that it has begun. False: the lease is no longer ours."""
    connection = connections[alias]
    as_json = "%s::jsonb" if is_postgresql(connection) else "%s"
    # The lock prevents that another owner takes the lease between reading and inserting and does not see the step.
    lock = "FOR UPDATE" if is_postgresql(connection) else ""
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {STEPS} (message_id, name, result, taken_at) "
            f"SELECT id, %s, {as_json}, {now(connection)} FROM {TABLE} "
            f"WHERE id = %s AND fence = %s AND state = 'running' AND next_attempt_at > {now(connection)} {lock} {_WRITE}",
            [step, result, row, fence],
        )
        return bool(cursor.rowcount == 1)


def remember_all(alias: str, row: int, steps: Mapping[str, str | None]) -> None:
    """Store the known steps of a message that failed under an external lease."""
    connection = connections[alias]
    as_json = "%s::jsonb" if is_postgresql(connection) else "%s"
    with connection.cursor() as cursor:
        for step, result in steps.items():
            cursor.execute(
                f"INSERT INTO {STEPS} (message_id, name, result, taken_at) "
                f"VALUES (%s, %s, {as_json}, {now(connection)}) {_WRITE}",
                [row, step, result],
            )


def forget_begun(alias: str, row: int, fence: int, step: str) -> None:
    """Delete a step that was begun and has not ended, unless the message has a later fence."""
    Step.objects.using(alias).filter(message_id=row, message__fence=fence, name=step, result__isnull=True).delete()

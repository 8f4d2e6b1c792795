"""Many rows at once, for tests of the plan of a query or of a limit: by one statement, whose rows need not be sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import connection

from inbox.models import InboxMessage
from tests.support.inbox_rows import RECEIPTS

if TYPE_CHECKING:
    from outbox.models import OutboxMessage

_RANDOM_ID = {"postgresql": "gen_random_uuid()", "sqlite": "lower(hex(randomblob(16)))"}
_RECEIPT_ID = {"postgresql": "nextval('inbox_receipt_id_seq')", "sqlite": "(SELECT max(id) FROM inbox_receipt) + n"}


def multiply(row: OutboxMessage | InboxMessage, count: int, **changed: str) -> None:
    """Insert this many copies of the row.

    Args:
        changed: columns that differ, as expressions of the number `n` of the copy. Message and biz-id differ anyway.
    """
    table, is_inbox = row._meta.db_table, isinstance(row, InboxMessage)
    columns = [field.column for field in row._meta.concrete_fields if is_inbox or not field.primary_key]
    own = {"biz_id": "CAST(n AS text)", "message_id": "CAST(n AS text)" if is_inbox else _RANDOM_ID[connection.vendor]}
    values = {"id": _RECEIPT_ID[connection.vendor], **own, **changed}
    with connection.cursor() as cursor:
        cursor.execute(
            f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count}) "
            f"INSERT INTO {table} ({', '.join(columns)}) "
            f"SELECT {', '.join(values.get(column, f'original.{column}') for column in columns)} "
            f"FROM {table} original, numbers WHERE original.id = %s",
            [row.pk],
        )
        if is_inbox:
            cursor.execute(RECEIPTS)

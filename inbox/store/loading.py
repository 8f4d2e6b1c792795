"""Messages from rows that a statement of PostgreSQL returns, without the ORM, which takes longer than the statement."""

import json
from collections.abc import Sequence
from typing import Any

from django.db.models import JSONField

from inbox.models import InboxMessage

_FIELDS = InboxMessage._meta.concrete_fields
_NAMES = [field.attname for field in _FIELDS]
_JSON = [index for index, field in enumerate(_FIELDS) if isinstance(field, JSONField)]


def columns_of(table: str) -> str:
    """All columns of a message, for the RETURNING of a statement."""
    return ", ".join(f"{table}.{field.column}{'::text' if isinstance(field, JSONField) else ''}" for field in _FIELDS)


def message_of(alias: str, row: Sequence[Any]) -> InboxMessage:
    """The message whose columns, as in `columns_of`, are this row."""
    values = [*row]
    for index in _JSON:
        values[index] = None if values[index] is None else json.loads(values[index])
    return InboxMessage.from_db(alias, _NAMES, values)

"""Messages in the inbox that no delivery has brought there: each with its receipt, as the inbox stores it."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from inbox.models import InboxMessage, Receipt
from inbox.store import receipts

RECEIPTS = """
INSERT INTO inbox_receipt (id, handler, topic, biz_id, message_id, digest, received_at)
SELECT id, handler, topic, biz_id, message_id, digest, received_at FROM inbox_inboxmessage WHERE true
ON CONFLICT DO NOTHING
"""
"""After an INSERT of messages by hand, whose ids are `NEXT_ID`: their receipts."""
NEXT_ID = "nextval('inbox_receipt_id_seq')"


def store_message(*, using: str = "default", **columns: Any) -> InboxMessage:
    """Store a message with these columns."""
    with transaction.atomic(using=using):
        return receipts.create(using, **columns)


def rename_messages(**names: str) -> None:
    """Give all stored messages another handler or biz-id."""
    InboxMessage.objects.update(**names)
    Receipt.objects.update(**names)


def delete_messages() -> None:
    """Delete all stored messages, as if none had ever come."""
    InboxMessage.objects.all().delete()
    Receipt.objects.all().delete()


def copy_of(row: InboxMessage, **changes: Any) -> InboxMessage:
    """Store another message with the columns of `row`, except these."""
    columns = {field.attname: getattr(row, field.attname) for field in row._meta.concrete_fields if not field.primary_key}
    return store_message(**{**columns, **changes})

"""Messages in the inbox that no delivery has brought there: each with its receipt, as the inbox stores it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from exactly_once.sql.days import day_of
from exactly_once.sql.now import DatabaseTime
from inbox.models import InboxMessage, Receipt
from inbox.states import SETTLED, State
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


def settle(rows: QuerySet[InboxMessage], state: State = State.DONE, *, ago: timedelta = timedelta()) -> None:
    """Give these messages a settled state, as if that had been `ago`."""
    rows.update(state=state, settled_at=DatabaseTime(-ago), next_attempt_at=None, day=day_of(rows.db, ago))


def make_older(rows: QuerySet[InboxMessage], ago: timedelta) -> None:
    """As if these messages had arrived, and those that are settled had been settled, `ago`."""
    names = list(rows.values_list("pk", flat=True))
    InboxMessage.objects.using(rows.db).filter(pk__in=names).update(received_at=DatabaseTime(-ago))
    settled = InboxMessage.objects.using(rows.db).filter(pk__in=names, state__in=SETTLED)
    settled.update(settled_at=DatabaseTime(-ago), day=day_of(rows.db, ago))
    settled.filter(conflicting_at__isnull=False).update(conflicting_at=DatabaseTime(-ago))
    Receipt.objects.using(rows.db).filter(pk__in=names).update(received_at=DatabaseTime(-ago))


def rows_of(handler: str, *, but: frozenset[str] = frozenset({"received_at", "settled_at"})) -> list[dict[str, Any]]:
    """The messages of a handler by biz-id, with the columns that another handler has alike, `but` these."""
    columns = [field.name for field in InboxMessage._meta.fields if field.name not in {"id", "handler", *but}]
    return list(InboxMessage.objects.filter(handler=handler).order_by("biz_id").values(*columns))


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
    copied = {field.attname for field in row._meta.concrete_fields} - {"id", "day"}
    return store_message(**{**{name: getattr(row, name) for name in copied}, **changes})

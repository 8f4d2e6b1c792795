"""What is known of one message in one handler: `inbox.result()`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import or_
from uuid import UUID

from django.db import DEFAULT_DB_ALIAS
from django.db.models import Q

from exactly_once.sql.fields import value_of
from exactly_once.sql.partitions import lately, newest
from inbox.deaths import SUFFIX
from inbox.handlers.message import FailedAttempt
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, Receipt
from inbox.states import State
from inbox.store import claims
from inbox.store.message_rows import PARKED, business_id

_MOST = 100
_UNREAD = ("body", "headers", "conflicting_body", "conflicting_attributes", "result")


@dataclass(frozen=True, kw_only=True)
class MessageResult:
    """What is known of one message in one handler.

    Attributes:
        handler: the name of the handler.
        id: the message id.
        biz_id: what it is deduplicated on.
        topic: the topic.
        state: its state. None: it was done, skipped or shed, and its history has been dropped, or the inbox keeps none; then
            `attempts` is 0, and no other instant known.
        is_running: a process holds a claim or a lease of it, or has locked its row to run it. A process that was killed holds
            its claim or lease until that ends. A first delivery from a broker that runs at once has no row before it commits.
        attempts: the number of attempts begun since it arrived, or since an operator has retried it.
        received_at: when it arrived, by the database's clock, as all instants.
        last_attempt_at: when the last attempt with an outcome ended; None if none has.
        settled_at: when it became done, dead, skipped or shed; None before.
        error_class, last_error, traceback: of the last attempt if that failed, or why it is dead; "" if it is done.
        errors: its failed attempts, the oldest first; of many only the latest ten.
    """

    handler: str
    id: str
    biz_id: str
    topic: str
    state: State | None
    is_running: bool = False
    attempts: int = 0
    received_at: datetime
    last_attempt_at: datetime | None = None
    settled_at: datetime | None = None
    error_class: str = ""
    last_error: str = ""
    traceback: str = ""
    errors: tuple[FailedAttempt, ...] = ()


def result(message_id: str | UUID, *, handler: str = "", using: str = DEFAULT_DB_ALIAS) -> MessageResult | None:
    """What is known of this message in a handler; None: nothing, as before it arrives.

    A message without a biz-id of its own is known for `RETENTION`, any other for `KEEP_HISTORY` after it was settled. Of a
    message whose payload an operator has corrected, it is what became of the correction.

    Args:
        handler: the name of the handler; default: the only one that has it, besides `on_dead`.
        using: the database of the handler.

    Raises:
        ValueError: several handlers have it, and none was named; the error names them.
    """
    name = str(message_id)
    if not name:
        return None
    # Before the rows: one that arrives in between has a row.
    receipts = _receipts(using, name, handler)
    rows: dict[str, list[InboxMessage]] = {}
    for row in _rows(using, name, handler):
        rows.setdefault(row.handler, []).append(row)
    if len(names := sorted(receipts.keys() | rows.keys())) > 1:
        raise ValueError(f"Several handlers have the message {name}: {', '.join(names)}. Name one of them with handler=.")
    for stored in rows.values():
        # The newest, but for copies of it that are not decided yet.
        return _known(using, max(stored, key=lambda row: (not row.biz_id.startswith(PARKED), row.pk)))
    for receipt in receipts.values():
        columns = {column: getattr(receipt, column) for column in ("handler", "biz_id", "topic", "received_at")}
        return MessageResult(**columns, id=name, state=None)
    return None


def _receipts(alias: str, message_id: str, handler: str) -> dict[str, Receipt]:
    """By handler, the receipts of a message without a biz-id of its own. They are found by its biz-id."""
    handlers = [one for one in registry.all() if one.name == handler or not (handler or one.name.endswith(SUFFIX))]
    known = (Q(handler=one.name, topic__in=one.topics) for one in handlers)
    found = Receipt.objects.using(alias).filter(reduce(or_, known, Q(pk=None)), biz_id=message_id, message_id=message_id)
    return {one.handler: one for one in found}


def _rows(alias: str, message_id: str, handler: str) -> Sequence[InboxMessage]:
    rows = InboxMessage.objects.using(alias).filter(message_id=message_id).defer(*_UNREAD)
    if not handler:
        return newest(rows.exclude(handler__endswith=SUFFIX), _MOST)
    of_it = rows.filter(handler=handler)
    return list(of_it.filter(day__in=lately())) or newest(of_it, _MOST)


def _known(alias: str, row: InboxMessage) -> MessageResult:
    return value_of(
        MessageResult,
        row,
        id=row.message_id,
        biz_id=business_id(row.biz_id),
        state=State(row.state),
        is_running=claims.is_held(alias, row),
        last_attempt_at=row.settled_at if row.state == State.DONE else row.failed_at,
        errors=tuple(FailedAttempt.from_row(attempt) for attempt in row.failures or ()),
    )

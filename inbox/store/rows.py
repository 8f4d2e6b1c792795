"""What goes in and out of the store: a row to be, why a message failed, what a duplicate met."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from django.db import OperationalError

from outbox.database.faults import LOCK_TIMEOUT, sqlstate_of

UNIDENTIFIED = "unidentified:"
"""Prefix of the biz-id of a delivery whose own could not be found; never given to a handler's own identities."""
EDITED = "edited:"
"""Prefix of the biz-id of a row whose payload an operator has corrected; never given to a handler's own identities."""
PARTLY = "Its effect may be there in part. Check by hand, then retry or skip."
ABANDONED = f"The handler committed by itself. {PARTLY}"


def edited_name(row: int, biz_id: str) -> str:
    """The biz-id of the row that replaces `row`, with a corrected payload under the same biz-id."""
    return f"{EDITED}{row}:{biz_id}"


def business_id(biz_id: str) -> str:
    """The biz-id as the business knows it, of a row that may be the replacement of another."""
    return biz_id.split(":", 2)[2] if biz_id.startswith(EDITED) else biz_id


class TwinBusy(Exception):
    """Another transaction has this very message in hand and did not end in time."""


class KeyBusy(Exception):
    """Another message of the same ordering key is being run."""


@contextmanager
def locked_means_busy() -> Iterator[None]:
    """A statement of the block that waits for a lock for longer than lock_timeout raises TwinBusy."""
    try:
        yield
    except OperationalError as error:
        if sqlstate_of(error) == LOCK_TIMEOUT:
            raise TwinBusy from error
        raise


class OrderedKey(NamedTuple):
    """What one order is kept of: an ordering key in one handler."""

    handler: str
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRow:
    """A delivery that can be stored: identified, every text fit for its column, `headers` serialised.

    Attributes:
        replayed: an operator has had it sent again.
    """

    handler: str
    topic: str
    biz_id: str
    message_id: str
    key: str
    content_type: str
    body: bytes
    digest: str
    headers: str
    source: str
    correlation_id: str
    causation_id: str
    traceparent: str
    created_at: datetime | None
    replayed: bool = False


COLUMNS = {
    "handler": "varchar",
    "topic": "varchar",
    "biz_id": "varchar",
    "message_id": "varchar",
    "key": "varchar",
    "content_type": "varchar",
    "digest": "varchar",
    "headers": "jsonb",
    "source": "varchar",
    "correlation_id": "varchar",
    "causation_id": "varchar",
    "traceparent": "varchar",
    "created_at": "timestamptz",
    "body": "bytea",
}
"""What is stored of a `NewRow`, with PostgreSQL's types."""


def emptied(row: NewRow) -> NewRow:
    """The row without body and headers, as it is kept when the message is done. The digest stays."""
    return replace(row, body=b"", headers="{}")


def undecoded(row: NewRow) -> NewRow:
    """The row of a delivery whose values the database refuses: its body, under a name that the same delivery gets again."""
    named = f"{row.topic}\n{row.biz_id}\n{row.message_id}\n{row.digest}".encode("utf-8", "surrogatepass")
    biz_id = UNIDENTIFIED + hashlib.sha256(named).hexdigest()
    return with_body_only(row.handler, row.topic, biz_id, row.body, digest=row.digest)


def with_body_only(handler: str, topic: str, biz_id: str, body: bytes, *, digest: str) -> NewRow:
    """A row that says nothing of itself besides its name."""
    return NewRow(
        handler=handler,
        topic=topic,
        biz_id=biz_id,
        message_id="",
        key="",
        content_type="application/octet-stream",
        body=body,
        digest=digest,
        headers="{}",
        source="",
        correlation_id="",
        causation_id="",
        traceparent="",
        created_at=None,
    )


@dataclass(slots=True)
class Follower:
    """The message that follows in an order the one which is being run, for whoever will run it at once.

    Attributes:
        claimed_for: after which it is due again, when whoever claimed it has died.
        row: which one it is, its attempt counted, once the other is done; None when none follows.
    """

    claimed_for: timedelta
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Guard:
    """The rows that the open transaction began with, and what proves that it is still the same transaction.

    Attributes:
        is_settled: the rows were inserted as `done`, so the sentinel reads them and writes nothing.
        emptied: what they would say, if they were inserted without body and headers; in their order.
        order: the order that its one row has a place in, to be passed on to the next.
        follower: claims the next for the one who runs this; None leaves it to be found.
        was: the state that its rows were in before; "" when they are new.
    """

    alias: str
    rows: tuple[int, ...]
    transaction: str
    order: OrderedKey | None = None
    follower: Follower | None = None
    was: str = ""
    is_settled: bool = False
    emptied: tuple[NewRow, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a message is not done.

    Attributes:
        retry_after: rest until the next attempt; None makes it a dead letter.
        attempts: how many have been made now.
        put_off: the handler asked for a later time; nothing went wrong.
        quarantined: the maximum message age refused it; only an operator's override runs it.
        is_stored: its row says so already.
    """

    error: str
    traceback: str = ""
    retry_after: timedelta | None
    attempts: int
    put_off: bool = False
    quarantined: bool = False
    is_stored: bool = False


class DuplicateCause(StrEnum):
    """Why a message came again."""

    REDELIVERY = "redelivery"
    """The broker had delivered it before."""
    RESEND = "resend"
    """The same message was sent twice, as by a relay that crashed before it knew of the broker's confirm."""
    REPLAY = "replay"
    """An operator had it sent again."""
    BUSINESS = "business"
    """Another message of the same biz-id: whoever published it has said the same thing twice."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """The row that a duplicate met."""

    row: int
    state: str
    cause: DuplicateCause
    conflicting: bool
    abandoned: bool

"""The inputs and outputs of the store: a new row, a failure, the existing row of a duplicate."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.failures import REFUSED
from exactly_once.sql.prepared_statements import Prepared
from exactly_once.wire.envelope import OPAQUE, headers_as_json
from inbox.models import InboxMessage

PARKED = "parked:"
"""Prefix of the biz-id of a delivery that is stored as it came; a handler's own biz-ids never have it."""
EDITED = "edited:"
"""Prefix of the biz-id of a row that an operator has made of another with its biz-id; a handler's own biz-ids never have it."""
DEATH = "inbox:death"
"""The header with how a dead letter died, of the message that reports it."""
_DIGITS = 32
PARTLY = "Its effect may be there in part. Check by hand, then retry or skip."
ABANDONED = f"The handler committed by itself. {PARTLY}"


def edited_name(what: int | str, biz_id: str) -> str:
    """The biz-id of the row with a corrected payload that replaces row `what`; see also `conflicting_name`."""
    return f"{EDITED}{what}:{biz_id}"


def conflicting_name(digest: str, biz_id: str) -> str:
    """The biz-id of the row that other content under `biz_id` is run as."""
    return edited_name(digest[:_DIGITS], business_id(biz_id))


def business_id(biz_id: str) -> str:
    """The business's biz-id of a row that an operator may have made."""
    return biz_id.split(":", 2)[2] if biz_id.startswith(EDITED) else biz_id


class ConcurrentDuplicate(Exception):
    """Another transaction is handling the same message and did not end in time."""


class KeyBusy(Exception):
    """Another message of the same ordering key is being run."""


class OrderedKey(NamedTuple):
    """The scope of one order: an ordering key in one handler."""

    handler: str
    key: str


def order_of(stored: InboxMessage) -> OrderedKey | None:
    """The order that the row of this message has a place in."""
    return OrderedKey(stored.handler, stored.key) if stored.ordered and stored.key else None


class DuplicateCause(StrEnum):
    """The cause of a duplicate."""

    REDELIVERY = "redelivery"
    """The broker had delivered it before."""
    RESEND = "resend"
    """The same message was sent twice, as by a relay that crashed before it received the broker's confirm."""
    REPLAY = "replay"
    """An operator replayed it."""
    BUSINESS = "business"
    """Another message of the same biz-id: its publisher published the same fact twice."""


@dataclass(slots=True)
class NewRow:
    """A delivery that can be stored: identified, every text fit for its column, `headers` serialised. It is not changed.

    It is not frozen, because creating it would take more than twice as long. The first fields are those of `CARRIED`.

    Attributes:
        replayed: an operator replayed it.
        redelivered: the broker says that it has delivered it before.
        copies: further deliveries of it, which are counted with it.
    """

    key: str = ""
    content_type: str = OPAQUE
    source: str = ""
    correlation_id: str = ""
    causation_id: str = ""
    traceparent: str = ""
    created_at: datetime | None = None
    _: KW_ONLY
    handler: str
    topic: str
    biz_id: str
    body: bytes
    digest: str
    message_id: str = ""
    headers: str = "{}"
    replayed: bool = False
    redelivered: bool = False
    copies: int = 0

    @property
    def cause(self) -> DuplicateCause:
        """The cause of a duplicate with the message id of the first."""
        if self.redelivered:
            return DuplicateCause.REDELIVERY
        return DuplicateCause.REPLAY if self.replayed else DuplicateCause.RESEND


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
"""The stored columns of a `NewRow`, with PostgreSQL's types."""
columns_of = attrgetter(*COLUMNS)


CARRIED = ("key", "content_type", "source", "correlation_id", "causation_id", "traceparent", "created_at")
"""What a row has as its envelope has it, under the same names."""
carried_of = attrgetter(*CARRIED)


def attributes_of(row: NewRow) -> str:
    """What a conflicting duplicate has besides its id and body, as JSON."""
    attributes = dict(zip(CARRIED, carried_of(row), strict=True))
    return json.dumps({**attributes, "headers": row.headers}, default=datetime.isoformat)


def stored_row(stored: InboxMessage) -> NewRow:
    """The `NewRow` of a stored message."""
    columns = dict(zip(COLUMNS, columns_of(stored), strict=True))
    return NewRow(**{**columns, "body": bytes(stored.body), "headers": headers_as_json(stored.headers)})


def emptied(row: NewRow) -> NewRow:
    """The row without body and headers, as it is stored when the message is done. The digest stays."""
    return replace(row, body=b"", headers="{}")


def undecoded(row: NewRow) -> NewRow:
    """The row of a delivery whose values the database refuses: its body, under a biz-id that the same delivery gets again."""
    named = f"{row.topic}\n{row.biz_id}\n{row.message_id}\n{row.digest}".encode("utf-8", "surrogatepass")
    biz_id = PARKED + hashlib.sha256(named).hexdigest()
    return NewRow(handler=row.handler, topic=row.topic, biz_id=biz_id, body=row.body, digest=row.digest)


@dataclass(slots=True)
class Successor:
    """The message that is run after the one that is being run, claimed in the transaction that settles that one.

    It is the next one in its order. If there is none, it is one of its handler that is due.

    Attributes:
        claimed_for: the time after which it is due again, if its process has died.
        in_turn: called when the other message is settled; returns the handler of that, of which a due message is claimed if
            none is next in the order. Without it, only the next one is claimed; None claims nothing.
        begins: its transaction begins with the commit of the other's, where that is possible.
        message: it, with its attempt counted, once the other message is done; None if there is none, or it has begun.
        unknown: the transaction that claimed it, if its outcome is unknown; else "".
        running: the message that is being run: the first one, or a successor that has begun.
        handled: how many were handled before that one.
    """

    claimed_for: timedelta = timedelta()
    in_turn: Callable[[], Sequence[str] | None] = lambda: None
    begins: bool = False
    message: InboxMessage | None = None
    unknown: str = ""
    running: InboxMessage | None = None
    handled: int = 0


class Next(NamedTuple):
    """What is sent with the commit of a message for the one after it.

    Attributes:
        begin: the first statement of its transaction; None: it begins by itself.
        successor: gets it; None: it is a fresh delivery.
        in_turn: what `Successor.in_turn` has returned.
    """

    begin: Prepared | None
    successor: Successor | None = None
    in_turn: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Guard:
    """The rows that the open transaction began with, and the proof that it is still the same transaction.

    Attributes:
        transaction: its id; "" if only the savepoint proves it.
        begun: the indexes of its rows among those that were given.
        claimed: the stored message, if it is one; else the rows were inserted as `done`, and the sentinel writes nothing.
        order: the order that its one row has a place in; the next message in it is to be promoted.
        claims: a successor may be claimed in it.
        emptied: the full rows, in their order, if they were inserted without body and headers.
        result: the result that its row was inserted with, as JSON.
    """

    connection: BaseDatabaseWrapper
    rows: tuple[int, ...]
    transaction: str
    begun: tuple[int, ...] = ()
    claimed: InboxMessage | None = None
    order: OrderedKey | None = None
    claims: bool = False
    emptied: tuple[NewRow, ...] = ()
    result: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a message is not done.

    Attributes:
        retry_after: backoff until the next attempt; None makes it a dead letter.
        attempts: number of attempts made now.
        error_class, error_place: what failed and where, see `exactly_once.failures`.
        own_frames: the frames of the project's own code, as in a traceback.
        deferred: the handler deferred it; this is not an error.
        quarantined: the maximum message age refused it; only an operator's override runs it.
        is_stored: it is already in its row.
        seconds: how long the handler ran; None if it was not called, or it is not known.
    """

    error: str
    error_class: str = REFUSED
    error_place: str = ""
    own_frames: str = ""
    traceback: str = ""
    retry_after: timedelta | None
    attempts: int
    deferred: bool = False
    quarantined: bool = False
    is_stored: bool = False
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Earlier:
    """The earlier message of a duplicate; `state` is "" if its history has been dropped."""

    row: int
    state: str
    cause: DuplicateCause
    conflicting: bool

"""What a lease is, and what every store of leases promises.

A lease is the right to run one message until an instant, by the store's clock. Each carries a *fencing token*, greater than
that of any earlier lease of the same message (Kleppmann, "How to do distributed locking", 2016). Every write names it, and is
refused once the lease has ended or another has been given out: an owner that overslept settles nothing.

A store that cannot be asked raises, and then nothing is run: no lease is ever assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from inbox.handlers.handler import Handler
from inbox.handlers.options import Lease as Terms
from inbox.models import InboxMessage
from inbox.store.rows import DuplicateCause, Failure, NewRow, OrderedKey
from inbox.transactions.persistence import DatabaseAway
from outbox.kernel.clock import monotonic
from outbox.kernel.envelope import headers_as_json


class LeaseStoreAway(DatabaseAway):
    """The store of leases does not answer. Nothing was decided, and nothing may be run."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A message that somebody wants to run.

    Attributes:
        row: what it is; for a delivery also what is stored when it fails.
        stored: its row, when it is stored and its attempt has been claimed; None for a delivery.
        redelivered: the broker says that it has delivered it before.
        sent_at: when it could first be delivered, by the producer's clock; None when nobody said.
    """

    handler: Handler
    row: NewRow
    stored: InboxMessage | None = None
    redelivered: bool = False
    sent_at: datetime | None = None

    @property
    def terms(self) -> Terms:
        """How long its lease lasts, and how long a run may take."""
        if self.handler.lease is None:
            raise ValueError(f"The handler {self.handler.name} has no lease.")
        return self.handler.lease

    @property
    def order(self) -> OrderedKey | None:
        """The order that its row has a place in."""
        stored = self.stored
        return OrderedKey(stored.handler, stored.key) if stored is not None and stored.ordered and stored.key else None

    @property
    def alone_in(self) -> OrderedKey | None:
        """The key of which no other message may run meanwhile; also when it has lost its place in the order."""
        stored = self.stored
        wanted = stored is not None and stored.key and (stored.ordered or self.handler.ordered)
        return OrderedKey(stored.handler, stored.key) if stored is not None and wanted else None

    def leaves(self, failure: Failure) -> OrderedKey | None:
        """The order that it loses its place in when it has failed like this."""
        return self.order if failure.retry_after is None and self.handler.skips_dead else None


@dataclass(eq=False, kw_only=True)
class Lease:
    """The right to run `wanted`.

    Attributes:
        fence: the fencing token.
        attempt: which try this is, counted from 1.
        pk: the message's row, if it is known to have one.
        owner: this lease's own name, where the store wants one.
        steps: results of the steps that earlier runs took, as JSON by name; None for one that was begun and never ended.
        began_at, ends_at: monotonic; the end is never later than the store's own.
        settling: its handler has ended, and whether it is still ours is being found out.
        lost: it is known to be nobody's or another's.
    """

    wanted: Wanted
    fence: int
    attempt: int
    began_at: float
    pk: int | None = None
    owner: str = ""
    steps: dict[str, str | None] = field(default_factory=dict)
    settling: bool = False
    lost: bool = False

    def __post_init__(self) -> None:
        self.ends_at = self.began_at + self.wanted.terms.duration.total_seconds()

    def __str__(self) -> str:
        row = self.wanted.row
        return f"{row.handler}: message {row.message_id or 'without id'} (biz-id {row.biz_id}), fence {self.fence}"

    @property
    def is_over(self) -> bool:
        """Is it lost, or has it ended for all that this process can know?"""
        return self.lost or monotonic() >= self.ends_at


@dataclass(frozen=True, slots=True)
class Held:
    """Another owner runs it now.

    Attributes:
        remaining: until the end of that lease.
        attempts: made so far, that one included.
        cause: why it came again.
        conflicting: that one says something else under the same biz-id.
    """

    remaining: timedelta
    attempts: int = 0
    cause: DuplicateCause = DuplicateCause.BUSINESS
    conflicting: bool = False


@dataclass(frozen=True, slots=True)
class Consumed:
    """It has been run to its end before.

    Attributes:
        counted: the store has counted this duplicate itself, having found `cause` and `conflicting`; else its row counts it.
    """

    counted: bool = False
    cause: DuplicateCause = DuplicateCause.BUSINESS
    conflicting: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """Its row in the database decides: it has failed before, or is not this claimer's any more."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The store has lost its memory since: whether it has been run before can not be known."""

    reason: str


Verdict = Lease | Held | Consumed | Kept | Forgotten


class LeaseStore(Protocol):
    """Where leases are kept. Each call is atomic and durable when it returns, as far as the store is durable at all.

    Every method raises LeaseStoreAway or DatabaseAway when the store cannot be asked. Asking a second time for what was
    granted, because the first answer was lost, gives the same answer.
    """

    def acquire(self, wanted: Wanted, *, twin_timeout: timedelta) -> Verdict:
        """Get the right to run a message, with its attempt counted.

        Raises:
            TwinBusy: a transaction is inserting its row right now and does not end within `twin_timeout`.
            KeyBusy: another message of its key is running; nothing was decided.
        """

    def extend(self, lease: Lease, by: timedelta) -> bool:
        """Let it end `by` from now. False: it is not ours any more."""

    def remember(self, lease: Lease, step: str, result: str | None) -> bool:
        """Write down what a step returned, or with None that it has begun. False: the lease is not ours any more."""

    def consume(self, lease: Lease) -> bool:
        """It has been run to its end. False: the lease is not ours any more, and nothing is written."""

    def free(self, lease: Lease, failure: Failure) -> bool:
        """It has failed: store it to be retried, or as a dead letter. False: as `consume`."""

    def forget(self, lease: Lease, step: str) -> None:
        """This step, which was begun and has not ended, counts as never begun; unless there was a later lease."""

    def is_held(self, alias: str, row: NewRow) -> bool:
        """Does somebody run this stored message now? From here on its row decides about it, once that run has ended."""

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """By handler, what has left no row: `handled`, its `duplicates`, these by cause, and `conflicts` among them."""


def stored_row(stored: InboxMessage) -> NewRow:
    """A stored message as the delivery that it came with."""
    return NewRow(
        handler=stored.handler,
        topic=stored.topic,
        biz_id=stored.biz_id,
        message_id=stored.message_id,
        key=stored.key,
        content_type=stored.content_type,
        body=bytes(stored.body),
        digest=stored.digest,
        headers=headers_as_json(stored.headers),
        source=stored.source,
        correlation_id=stored.correlation_id,
        causation_id=stored.causation_id,
        traceparent=stored.traceparent,
        created_at=stored.created_at,
    )

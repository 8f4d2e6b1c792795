"""A message on its way to its handler: a delivery, or a stored row whose attempt was claimed."""

from dataclasses import dataclass

from exactly_once.wire.envelope import Envelope
from inbox.handlers.handler import Handler
from inbox.handlers.kinds import Lease as Terms
from inbox.handlers.message import Message
from inbox.models import InboxMessage
from inbox.store.message_rows import Failure, NewRow, OrderedKey, order_of


@dataclass(kw_only=True, slots=True)
class Arrival:
    """A message for its handler.

    Attributes:
        row: its content; for a delivery the row to insert.
        message: the handler's argument in its first run; None if it is refused, unread, or stored before it is run.
        stored: its row in the database, if its attempt was claimed; None for a delivery.
        refused: why it cannot be handled, so that it is stored as a dead letter; "" if it can.
        quarantined: the maximum message age is the only reason for refusing it.
        unread: its body has not been read.
    """

    handler: Handler
    row: NewRow
    envelope: Envelope
    message: Message | None = None
    stored: InboxMessage | None = None
    refused: str = ""
    quarantined: bool = False
    unread: bool = False

    @property
    def terms(self) -> Terms:
        """The duration of its lease, and the limit of a run."""
        if self.handler.lease is None:
            raise ValueError(f"The handler {self.handler.name} has no lease.")
        return self.handler.lease

    @property
    def order(self) -> OrderedKey | None:
        """The order that its row has a place in."""
        return None if self.stored is None else order_of(self.stored)

    @property
    def exclusive_key(self) -> OrderedKey | None:
        """The key whose other messages may not run at the same time, even if its row has left the order."""
        stored = self.stored
        if stored is None or not stored.key or not (stored.ordered or self.handler.ordered):
            return None
        return OrderedKey(stored.handler, stored.key)

    def leaves(self, failure: Failure) -> OrderedKey | None:
        """The order that its row leaves after this failure."""
        return self.order if failure.retry_after is None and self.handler.skips_dead else None

"""An exactly-once inbox for Django: a handler's effect happens once per message, however often the message is delivered.

    from inbox import Message, idempotent_handler

    @idempotent_handler("shop.order.placed", biz_id=lambda message: message.payload["order_id"])
    def reserve_stock(message: Message) -> None:
        Stock.objects.filter(...).update(...)

The names below are the public API.
"""

from inbox.errors import InboxError, Reject, RetryLater
from inbox.handlers.decorator import batch_handler, idempotent_handler, leased_handler
from inbox.handlers.message import Message
from inbox.handlers.options import Backoff, Batch, Lease, Ordered, Retry, Shed

__all__ = [
    "Backoff",
    "Batch",
    "InboxError",
    "Lease",
    "Message",
    "Ordered",
    "Reject",
    "Retry",
    "RetryLater",
    "Shed",
    "batch_handler",
    "idempotent_handler",
    "leased_handler",
]

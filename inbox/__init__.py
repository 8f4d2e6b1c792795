"""An exactly-once inbox for Django: a handler's effect happens once per message, however often the message is delivered.

    from inbox import Message, idempotent_handler

    @idempotent_handler("shop.order.placed", biz_id=lambda message: message.payload["order_id"])
    def reserve_stock(message: Message) -> None:
        Stock.objects.filter(...).update(...)

The names below are the public API. Those that need models are looked up on first use, because Django imports this package
before its models can be.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from inbox.errors import InboxError, Reject, RetryLater, UnknownHandler
from inbox.handlers.decorator import batch_handler, idempotent_handler, leased_handler
from inbox.handlers.kinds import Batch, Lease
from inbox.handlers.message import Message
from inbox.handlers.options import Backoff, Ordered, Retry, Shed

if TYPE_CHECKING:
    from inbox.operators.handler_pauses import HandlerState, pause, resume

__all__ = [
    "Backoff",
    "Batch",
    "HandlerState",
    "InboxError",
    "Lease",
    "Message",
    "Ordered",
    "Reject",
    "Retry",
    "RetryLater",
    "Shed",
    "UnknownHandler",
    "batch_handler",
    "idempotent_handler",
    "leased_handler",
    "pause",
    "resume",
]

_PAUSING = {"HandlerState", "pause", "resume"}


def __getattr__(name: str) -> Any:
    if name not in _PAUSING:
        raise AttributeError(f"module 'inbox' has no attribute {name!r}")
    return getattr(import_module("inbox.operators.handler_pauses"), name)

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
from inbox.handlers.message import FailedAttempt, Message
from inbox.handlers.options import Backoff, Ordered, Retry, Shed

if TYPE_CHECKING:
    from inbox.operators.handler_pauses import HandlerState, pause, resume
    from inbox.results import MessageResult, result

__all__ = [
    "Backoff",
    "Batch",
    "FailedAttempt",
    "HandlerState",
    "InboxError",
    "Lease",
    "Message",
    "MessageResult",
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
    "result",
    "resume",
]

_LATER = {
    **dict.fromkeys(("HandlerState", "pause", "resume"), "inbox.operators.handler_pauses"),
    **dict.fromkeys(("MessageResult", "result"), "inbox.results"),
}
"""Their modules need models."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'inbox' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)

"""A transactional outbox for Django: a message is published if and only if the transaction that wrote it committed.

    from outbox import publish

    with transaction.atomic():
        order.save()
        publish("shop.order.placed", {"order_id": order.id}, biz_id=f"order-{order.id}")

The names below are the public API. They are looked up on first use because Django imports this package before its models
can be.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.api import Draft, PublishedMessage, apublish, apublish_many, publish, publish_many
    from outbox.errors import (
        InvalidMessage,
        OutboxError,
        PayloadTooLarge,
        PublishedOutsideTransaction,
    )

__all__ = [
    "Draft",
    "InvalidMessage",
    "OutboxError",
    "PayloadTooLarge",
    "PublishedMessage",
    "PublishedOutsideTransaction",
    "apublish",
    "apublish_many",
    "publish",
    "publish_many",
]

_ERRORS = {"InvalidMessage", "OutboxError", "PayloadTooLarge", "PublishedOutsideTransaction"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'outbox' has no attribute {name!r}")
    return getattr(import_module("outbox.errors" if name in _ERRORS else "outbox.api"), name)

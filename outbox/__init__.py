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
    from outbox.api import Draft, PublishedMessage, apublish, apublish_many, arequest, publish, publish_many, request
    from outbox.callbacks import Answer, SettledMessage, UndecidedMessage, checker, on_dead, on_published
    from outbox.decisions import (
        Decision,
        Outcome,
        acancel,
        apublish_now,
        areschedule,
        arestore,
        cancel,
        publish_now,
        reschedule,
        restore,
    )
    from outbox.errors import (
        AlreadyDecided,
        InvalidMessage,
        NoChecker,
        OutboxError,
        PayloadTooLarge,
        PreparedInsideTransaction,
        PublishedOutsideTransaction,
        UnknownMessage,
    )
    from outbox.preparing import PreparedMessage, prepare
    from outbox.states import TopicState
    from outbox.topic_pauses import pause, resume

__all__ = [
    "AlreadyDecided",
    "Answer",
    "Decision",
    "Draft",
    "InvalidMessage",
    "NoChecker",
    "OutboxError",
    "Outcome",
    "PayloadTooLarge",
    "PreparedInsideTransaction",
    "PreparedMessage",
    "PublishedMessage",
    "PublishedOutsideTransaction",
    "SettledMessage",
    "TopicState",
    "UndecidedMessage",
    "UnknownMessage",
    "acancel",
    "apublish",
    "apublish_many",
    "apublish_now",
    "arequest",
    "areschedule",
    "arestore",
    "cancel",
    "checker",
    "on_dead",
    "on_published",
    "pause",
    "prepare",
    "publish",
    "publish_many",
    "publish_now",
    "request",
    "reschedule",
    "restore",
    "resume",
]

_MODULES = ("errors", "states", "callbacks", "api", "decisions", "topic_pauses", "preparing")
"""Those that need no models come first."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in (import_module(f"outbox.{each}") for each in _MODULES):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'outbox' has no attribute {name!r}")

"""The outbox in Django's admin: messages, failures and their reasons, and the operator's actions."""

from outbox.admin import overview as overview
from outbox.admin.callbacks import PendingCallbackAdmin
from outbox.admin.messages import OutboxMessageAdmin
from outbox.admin.paused import PausedTopicAdmin

__all__ = [
    "OutboxMessageAdmin",
    "PausedTopicAdmin",
    "PendingCallbackAdmin",
]

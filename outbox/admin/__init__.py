"""The outbox in Django's admin: messages, failures and their reasons, and the operator's actions."""

from outbox.admin import overview as overview
from outbox.admin.callbacks import PendingCallbackAdmin
from outbox.admin.messages import OutboxMessageAdmin
from outbox.admin.paused import PausedTopicAdmin
from outbox.admin.selections import PreparedMessageAdmin, ScheduledMessageAdmin

__all__ = [
    "OutboxMessageAdmin",
    "PausedTopicAdmin",
    "PendingCallbackAdmin",
    "PreparedMessageAdmin",
    "ScheduledMessageAdmin",
]

"""The outbox in Django's admin: messages, failures and their reasons, and the operator's actions."""

from outbox.admin import overview as overview
from outbox.admin.messages import OutboxMessageAdmin
from outbox.admin.paused_topics import PausedTopicAdmin
from outbox.admin.pending_callbacks import PendingCallbackAdmin

__all__ = [
    "OutboxMessageAdmin",
    "PausedTopicAdmin",
    "PendingCallbackAdmin",
]

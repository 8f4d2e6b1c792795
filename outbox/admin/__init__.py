"""The outbox in Django's admin: what waits, what failed and why, what an operator may do about it, and which relays run."""

from outbox.admin.callbacks import PendingCallbackAdmin
from outbox.admin.messages import OutboxMessageAdmin
from outbox.admin.paused import PausedTopicAdmin
from outbox.admin.prepared import PreparedMessageAdmin
from outbox.admin.relays import RelayAdmin
from outbox.admin.scheduled import ScheduledMessageAdmin

__all__ = [
    "OutboxMessageAdmin",
    "PausedTopicAdmin",
    "PendingCallbackAdmin",
    "PreparedMessageAdmin",
    "RelayAdmin",
    "ScheduledMessageAdmin",
]

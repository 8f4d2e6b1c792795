"""The outbox in Django's admin: messages, failures and their reasons, the operator's actions, and the running relays."""

from outbox.admin.callbacks import PendingCallbackAdmin
from outbox.admin.health import OutboxHealthAdmin
from outbox.admin.messages import OutboxMessageAdmin
from outbox.admin.overview import OutboxOverviewAdmin
from outbox.admin.paused import PausedTopicAdmin
from outbox.admin.prepared import PreparedMessageAdmin
from outbox.admin.relays import RelayAdmin
from outbox.admin.scheduled import ScheduledMessageAdmin

__all__ = [
    "OutboxHealthAdmin",
    "OutboxMessageAdmin",
    "OutboxOverviewAdmin",
    "PausedTopicAdmin",
    "PendingCallbackAdmin",
    "PreparedMessageAdmin",
    "RelayAdmin",
    "ScheduledMessageAdmin",
]

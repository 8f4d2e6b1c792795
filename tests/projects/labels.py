from inbox.apps import InboxConfig
from outbox.apps import OutboxConfig


class EventBus(OutboxConfig):
    label = "eventBus"


class EventInbox(InboxConfig):
    label = "eventInbox"

from inbox.apps import InboxConfig
from outbox.apps import OutboxConfig


class EventBus(OutboxConfig):
    label = "eventBus"


class EventInbox(InboxConfig):
    label = "eventInbox"


class MessageOutbox(OutboxConfig):
    label = "message_outbox"


class MessageInbox(InboxConfig):
    label = "message_inbox"

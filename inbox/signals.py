"""What the consumer tells the process it runs in, after the state was committed. Receivers are called with `send_robust`."""

from django.dispatch import Signal

message_handled = Signal()
"""The effect is committed. Arguments: `message`, `handler` (its name)."""

message_retrying = Signal()
"""An attempt failed or the handler asked for a later time. Arguments: `handler`, `message_id`, `error`."""

message_dead = Signal()
"""It is a dead letter now. Arguments: `handler`, `message_id`, `error`."""

duplicate_suppressed = Signal()
"""A delivery whose effect has already happened, or is stored to happen. Arguments: `handler`, `message_id`, `biz_id`,
`cause`: "redelivery" by the broker, "resend" of the same message, "replay" by an operator, or "business", another message with
the same biz-id."""

conflicting_duplicate = Signal()
"""Same handler, topic and biz-id, but different content: a bug upstream. Arguments: `handler`, `message_id`, `biz_id`."""

message_shed = Signal()
"""It was dropped because too many wait, and written down. Arguments: `handler`, `message_id`, `biz_id`, `reason`."""

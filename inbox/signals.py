"""Signals of the consumer, for metrics only. They are not guaranteed, so no effect may depend on one.

A signal is sent after the commit, in the process that did the work, and is lost if that process dies in between. The states
in the table are not lost. Put required effects into a handler.

Receivers run in the thread of the worker that handled the message: a slow receiver delays the worker. They are called with
`send_robust`: an error in one is logged and changes nothing.

Each signal of a message has the name of its `handler`, and its `topic`, `message_id` and `biz_id`, as in `outbox.signals`.
"""

from django.dispatch import Signal

from exactly_once.upkeep.alerting import alert_changed  # noqa: F401 - public here

message_handled = Signal()
"""The effect is committed."""

message_retrying = Signal()
"""An attempt failed or the handler raised RetryLater. Argument: `error`."""

message_dead = Signal()
"""A message became a dead letter. Argument: `error`, the last reason."""

duplicate_suppressed = Signal()
"""A duplicate was suppressed: its message was handled before, or is stored and will run. Argument: `cause`: "redelivery"
by the broker, "resend" of the same message, "replay" by an operator, or "business", another message with the same biz-id."""

conflicting_duplicate = Signal()
"""A duplicate has the same handler, topic and biz-id, but different content: a bug upstream."""

message_shed = Signal()
"""A message was dropped by load shedding and stored as shed. Argument: `reason`."""

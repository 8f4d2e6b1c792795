"""Signals of the relay, for metrics only. They are not guaranteed, so no effect may depend on one.

A signal is sent after the commit, in the process that did the work, and is lost if that process dies in between. The states
in the table are not lost. Put required effects into a callback (`outbox.on_published`, `outbox.on_dead`).

Receivers run in the relay's own thread: one that waits for the network or a database delays every message of its relay. They
are called with `send_robust`: an error in one is logged and changes nothing.

Each signal of a message has its `topic`, `message_id` and `biz_id`, as those of `inbox.signals` have.
"""

from django.dispatch import Signal

from exactly_once.upkeep.alerting import alert_changed  # noqa: F401 - public here

message_published = Signal()
"""The broker confirmed it."""

message_retrying = Signal()
"""An attempt failed (nacked, refused, or unroutable). Argument: `error`."""

message_dead = Signal()
"""Out of attempts. Argument: `error`, the last reason. See `outbox.on_dead` for effects."""

message_expired = Signal()
"""Its `expires_in` ran out before it could be published."""

message_stuck = Signal()
"""The checker of a prepared message has answered "unknown" `CHECKS["LIMIT"]` times. Argument: `error`, the last answer."""

"""Signals of the relay, for metrics only. Nothing is promised of them, so no effect may depend on one.

A signal is sent after the commit, in the process that did the work, and is lost when that dies in between. The states in the
table are not lost, and what must happen belongs in a callback (`outbox.on_published`, `outbox.on_dead`).

Receivers run in the relay's own thread: one that waits for the network or a database holds up every message of its relay.
They are called with `send_robust`: an error in one is logged and changes nothing. `message` is the settled `RelayedMessage`.
"""

from django.dispatch import Signal

from exactly_once.upkeep.alerting import alert_changed  # noqa: F401 - public here

message_published = Signal()
"""The broker confirmed it."""

message_retrying = Signal()
"""An attempt failed (nacked, refused, or unroutable); `error` says why."""

message_dead = Signal()
"""Out of attempts; `error` is the last reason. See `outbox.on_dead` for what must come of it."""

message_expired = Signal()
"""Its `expires_in` ran out before it could be published."""

message_stuck = Signal()
"""A prepared message whose checker has answered "unknown" `CHECKS["LIMIT"]` times; `message` is its `UndecidedMessage`, `error`
the last answer."""

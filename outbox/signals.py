"""What the relay tells the process it runs in, always after the state was committed, never before.

Receivers get `message`, the settled `RelayedMessage`. They are called with `send_robust`: an error in one is logged and
changes nothing. A signal is lost if the process dies between the commit and the call; the state in the table is not.
"""

from django.dispatch import Signal

message_published = Signal()
"""The broker confirmed it."""

message_retrying = Signal()
"""An attempt failed (nacked, refused, or unroutable); `error` says why."""

message_dead = Signal()
"""Out of attempts; `error` is the last reason. The "send callback" of a failure."""

message_expired = Signal()
"""Its `expires_in` ran out before it could be published."""

message_stuck = Signal()
"""A prepared message whose checker has answered "unknown" `CHECK_LIMIT` times; `message` is its `HalfMessage`, `error` the last
answer."""

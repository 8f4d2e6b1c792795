"""The message being handled in this context, so that messages that its handler publishes can name their cause."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

OUTER_CORRELATION = "outercorrelationid"
"""The header of a request: the correlation id of the chain in which it was made, which its answer continues."""


@dataclass(frozen=True)
class Cause:
    """The cause of a message that is published now.

    Attributes:
        message_id: the message being handled; becomes the causation id.
        correlation_id: the first message of the whole chain.
        traceparent: the W3C trace context of the message being handled, or "".
    """

    message_id: str = ""
    correlation_id: str = ""
    traceparent: str = ""


handled: ContextVar[Cause | None] = ContextVar("message being handled", default=None)
_NO_CAUSE = Cause()


def current_cause() -> Cause:
    return handled.get() or _NO_CAUSE


@contextmanager
def caused_by(cause: Cause) -> Iterator[None]:
    token = handled.set(cause)
    try:
        yield
    finally:
        handled.reset(token)

"""The interface of a transport, which sends messages to a broker or to the inbox.

A transport declares its `Capabilities`, and its users do not check which broker it is. One thread uses a transport.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from exactly_once.process.loop import StopRequest
from exactly_once.wire.envelope import Envelope


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of a transport.

    Attributes:
        confirms: does the broker confirm that it has accepted a message?
        transactional: does sending write to the outbox's own database, inside the pass's transaction?
        durable: does a message survive the end of all processes? If not, the transport is for development only.
        limited: do the rates of topics apply?
        weakness: human-readable: the guarantees that are weaker than RabbitMQ's; "" if none.
    """

    confirms: bool
    transactional: bool = False
    durable: bool = True
    limited: bool = True
    weakness: str = ""


class PublishOutcome(Enum):
    """The broker's answer for one message."""

    CONFIRMED = "confirmed"
    RETURNED = "returned"
    """No queue is bound for it."""
    NACKED = "nacked"
    """The broker could not accept it."""
    REFUSED = "refused"
    """It cannot be sent in its present form."""
    FORBIDDEN = "forbidden"
    """The broker does not permit messages of its topic."""
    UNKNOWN = "unknown"
    """No answer before the deadline, or the connection broke. The broker may or may not have the message."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome and its human-readable reason ("" if confirmed)."""

    outcome: PublishOutcome
    reason: str = ""


CONFIRMED = Verdict(PublishOutcome.CONFIRMED)


class OutgoingMessage(NamedTuple):
    """An outgoing message.

    Attributes:
        position: identifies the message in the answer.
        priority: the broker's message priority.
        wire: the text of a `formats.Wire`, for a message that is not sent as a CloudEvent: then only the id and the body of
            the envelope are sent.
        expires_in_seconds: seconds until the broker expires it; None if it never expires, or if `wire` has the expiration.
        exchange: the exchange to publish to; "" is that of the transport. A transport without exchanges ignores it.
        queue: the name of the only queue to send it to, see `broker.queue_name`; "" for every queue of its topic.
    """

    position: int
    envelope: Envelope
    priority: int = 0
    wire: str | None = None
    expires_in_seconds: float | None = None
    queue: str = ""
    exchange: str = ""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The answer to one `send`.

    Attributes:
        verdicts: by position; the outcome of a missing message is unknown.
        awaited: the positions of those without a verdict whose answer may still come, see `Transport.news`.
        broken: why the connection was lost, or None while it is healthy.
        suspected: the positions of messages one of which made the broker close the connection. A single one has a verdict. Send
            the others again.
        suspicious: send fewer messages next time; the broker blocks publishers.
    """

    verdicts: Mapping[int, Verdict] = field(default_factory=dict)
    awaited: Collection[int] = ()
    broken: str | None = None
    suspected: Sequence[int] = ()
    suspicious: bool = False


class BrokerUnavailable(Exception):
    """The broker cannot be reached or used now. Count no attempt; wait and connect again."""


class BrokerRefused(BrokerUnavailable):
    """The broker refuses this login or virtual host, or a permission that every message needs."""


class Companion(Protocol):
    """A loop that must run beside the relay so that messages take effect."""

    def run(self, stop: StopRequest) -> None:
        """Work until asked to stop."""

    def drain(self, stop: StopRequest) -> int:
        """Work until nothing is due; return the number of completed items."""


class Transport:
    """One way to send messages. The defaults are those of a transport without a connection, which answers at once.

    Attributes:
        round_trip: seconds of the last round trip to the broker; None before the first, or without a broker.
    """

    capabilities: Capabilities
    round_trip: float | None = None

    def connect(self) -> None:
        """Open the connection unless it is healthy.

        Raises:
            BrokerUnavailable: the broker cannot be used now.
        """

    def send(self, messages: Sequence[OutgoingMessage], deadline: float, *, ends_early: bool = False) -> Sent:
        """Send `messages` in order and wait for the broker's answers until `deadline` (`clock.monotonic`).

        A broken connection is part of the answer, not an exception.

        Args:
            ends_early: wait no longer than some round trips in which no answer comes.
        """
        raise NotImplementedError

    def probe(self, message: OutgoingMessage, deadline: float) -> Sent:
        """Send a message that the broker may not answer, so that it holds up no other; ends early."""
        return self.send([message], deadline, ends_early=True)

    def news(self) -> Mapping[int, Verdict]:
        """The answers since to messages that were `awaited`, by position; unknown if it can no longer come."""
        return {}

    def idle(self) -> None:
        """Keep the connection alive while there is nothing to send."""

    def close(self) -> None:
        """Close the connection, if there is one."""

    def companions(self) -> Sequence[Companion]:
        """Loops that must run beside the relay."""
        return ()

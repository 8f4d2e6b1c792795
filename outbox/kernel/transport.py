"""The contract of a transport, a way of carrying messages to where they are consumed.

A transport says what it can do in its `Capabilities`; nothing downstream asks which broker it is. It is used by one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from outbox.kernel.envelope import Envelope
from outbox.kernel.loop import StopRequest


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a transport can promise.

    Attributes:
        confirms: does the broker say when it has taken a message over?
        transactional: is sending itself a write in the outbox's own database, inside the pass's transaction?
        durable: does a message survive the end of all processes? Without it, for development only.
        weakness: for people, what to expect less of than of RabbitMQ; "" when nothing.
    """

    confirms: bool
    transactional: bool = False
    durable: bool = True
    weakness: str = ""


class PublishOutcome(Enum):
    """What the broker said of one message."""

    CONFIRMED = "confirmed"
    RETURNED = "returned"
    """No queue takes it."""
    NACKED = "nacked"
    """The broker could not keep it."""
    REFUSED = "refused"
    """It can never be sent as it is."""
    FORBIDDEN = "forbidden"
    """The broker does not permit messages of its topic."""
    UNKNOWN = "unknown"
    """No word within the deadline, or the connection broke. It may be in the broker, or not."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome and its reason for people ("" when confirmed)."""

    outcome: PublishOutcome
    reason: str = ""


CONFIRMED = Verdict(PublishOutcome.CONFIRMED)


class Parcel(NamedTuple):
    """One message on its way.

    Attributes:
        position: names it in the answer.
        priority: of the broker.
        wire: the text of a `kernel.wire.Wire`, for a message that does not travel as a CloudEvent: then only the id and the
            body of the envelope are sent.
        lasting: seconds until it expires, for the broker to keep to; None when it never does, or when `wire` says it.
    """

    position: int
    envelope: Envelope
    priority: int = 0
    wire: str | None = None
    lasting: float | None = None


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The answer to one `send`.

    Attributes:
        verdicts: by position; a message missing here is unknown.
        broken: why the connection is gone, or None while it is healthy.
        suspects: the positions of the messages of which one made the broker close the connection. When there is only one, it
            has its verdict. Send the others again.
        suspicious: send fewer next time; the broker blocks publishers.
    """

    verdicts: Mapping[int, Verdict] = field(default_factory=dict)
    broken: str | None = None
    suspects: Sequence[int] = ()
    suspicious: bool = False


class BrokerUnavailable(Exception):
    """The broker cannot be reached or used now. Nobody's attempt; wait and connect again."""


class BrokerRefused(BrokerUnavailable):
    """The broker answers, and refuses this login or virtual host, or the rights that every message needs."""


class Companion(Protocol):
    """A loop that must run beside the relay for messages to take effect."""

    def run(self, stop: StopRequest) -> None:
        """Work until asked to stop."""

    def drain(self, stop: StopRequest) -> int:
        """Work until nothing is due; how much was done."""


class Transport(Protocol):
    """One way of carrying messages."""

    @property
    def capabilities(self) -> Capabilities: ...

    def connect(self) -> None:
        """Make the connection healthy, or leave it so if it is.

        Raises:
            BrokerUnavailable: not now.
        """

    def send(self, parcels: Sequence[Parcel], deadline: float) -> Sent:
        """Send all of `parcels` in order and wait for what the broker says, until `deadline` (`clock.monotonic`).

        A broken connection is an answer, not an exception.
        """

    def idle(self) -> None:
        """Nothing to send for the moment: keep the connection alive."""

    def close(self) -> None: ...

    def companions(self) -> Sequence[Companion]: ...

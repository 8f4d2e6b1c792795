"""What clients send and get."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import BaseModel, FailFast, Field

from exactly_once.http.fields import Body, Count, Seconds
from exactly_once.wire.text import ERROR_LENGTH
from inbox.http.reading import Leased

_LONGEST_LEASE = timedelta(hours=12)

Lease = Annotated[str, Field(pattern=r"^[0-9]{1,18}\.[0-9]{1,9}$")]
LeaseSeconds = Annotated[float, Field(strict=True, ge=1, le=_LONGEST_LEASE.total_seconds(), allow_inf_nan=False)]


class Reading(Body):
    """How many messages to wait for, and for how long they are the client's."""

    max_messages: Count = 1
    wait_seconds: Seconds = Field(0, description="How long to wait for the first message. 0: do not wait.")
    lease_seconds: LeaseSeconds = Field(60, description="Without an acknowledgement another client gets them after this.")

    @property
    def wait(self) -> timedelta:
        return timedelta(seconds=self.wait_seconds)

    @property
    def lease(self) -> timedelta:
        return timedelta(seconds=self.lease_seconds)


class Leases(Body):
    """The leases of messages, as they were read."""

    leases: Annotated[list[Lease], FailFast()] = Field(min_length=1)


class Extension(Leases):
    """Leases, and for how long the messages are the client's from now on."""

    lease_seconds: LeaseSeconds = 60

    @property
    def lease(self) -> timedelta:
        return timedelta(seconds=self.lease_seconds)


class Release(Leases):
    """Leases of messages that the client does not handle now."""

    delay_seconds: Seconds | None = Field(
        None, description="Until another client gets them. Default: at once; after an error, as the subscription's retry says."
    )
    error: Annotated[str, Field(max_length=ERROR_LENGTH)] = Field(
        "", description="Why the attempt failed. Empty: it is not a failure, and does not count as an attempt."
    )

    @property
    def delay(self) -> timedelta | None:
        return None if self.delay_seconds is None else timedelta(seconds=self.delay_seconds)


class LeasedMessage(BaseModel):
    """A message, and the lease that acknowledges it."""

    lease: str
    id: str = Field(description="The same whenever the message is read: the idempotency key of its effects.")
    topic: str
    biz_id: str
    key: str
    payload: Any
    headers: Mapping[str, Any]
    created_at: datetime | None
    attempt: int = Field(description="Counted from 1.")
    fence: int = Field(description="Greater than that of any earlier lease of this message.")
    correlation_id: str
    causation_id: str

    @classmethod
    def of(cls, leased: Leased) -> LeasedMessage:
        message = leased.message
        return cls(lease=leased.lease, **{name: getattr(message, name) for name in cls.model_fields if name != "lease"})


class LeasedMessages(BaseModel):
    """Empty if no message came in time."""

    messages: list[LeasedMessage]


class SettledLeases(BaseModel):
    """Each lease of the request is in one of the two lists."""

    settled: list[str] = Field(description="The request was done for them.")
    ended: list[str] = Field(
        description="They have ended, and nothing was changed: their messages are another client's, due again, or handled."
    )

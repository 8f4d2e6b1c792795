"""What clients send and get."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from exactly_once.console.http.frame import Body, Duration, Flag, Instant, Name
from outbox.api import Draft
from outbox.models import MAX_PRIORITY

Priority = Annotated[int, Field(strict=True, ge=0, le=MAX_PRIORITY)]


class NewMessage(Body):
    """A message to publish."""

    topic: Name
    payload: Any = Field(description="Any JSON value. Fractions are stored in double precision.")
    biz_id: Name | None = Field(None, description="The business's own name of the fact; consumers deduplicate on it.")
    key: Annotated[str, Field(max_length=255)] = Field("", description="Messages with the same key keep their order.")
    headers: Mapping[str, StrictStr | StrictBool | StrictInt | StrictFloat] = Field(default_factory=dict)
    priority: Priority = Field(0, description="0 to 9, higher first; not together with a key.")
    delay: Duration | None = Field(None, description="Not delivered before this time from now.")
    deliver_at: Instant | None = Field(None, description="Not delivered before this instant.")
    expires_in: Duration | None = Field(None, description="Not delivered if it has been due for this long.")
    unique: Flag = Field(False, description="At most one message with this topic and biz-id, as long as it is retained.")

    @property
    def draft(self) -> Draft:
        return Draft(**dict(self))


class NewMessages(Body):
    """Messages to publish in one transaction: all of them or none."""

    messages: Annotated[list[NewMessage], FailFast()] = Field(min_length=1)


class FromObject(BaseModel):
    """A part of an answer, made by `model_validate` from an object with attributes of these names, or of the aliases."""

    model_config = ConfigDict(from_attributes=True)


class Published(FromObject):
    """A message that was published, or found by its biz-id."""

    id: UUID
    topic: str
    biz_id: str
    created: bool = Field(description="False: an earlier request or transaction published it.")
    state: str


class PublishedMessages(BaseModel):
    """In the order of the request."""

    messages: list[Published]


class Chosen(Body):
    """A message by its id, or messages by topic and biz-id."""

    id: UUID | None = None
    topic: Name | None = None
    biz_id: Name | None = None


class Rescheduling(Chosen):
    """Which messages, and their new time: `delay` or `deliver_at`. No delay publishes them now."""

    delay: Duration | None = None
    deliver_at: Instant | None = None


class Restoring(Chosen):
    """A message by its id, all with a topic and biz-id, or all of a topic."""

    states: list[Literal["cancelled", "expired", "dead", "retrying"]] | None = Field(
        None, min_length=1, description="Only messages in these states. Default: cancelled, expired and dead ones."
    )
    overdue: Flag = Field(True, description="False: only messages whose time is in the future.")


class Decided(BaseModel):
    """What was done, and the state that the message has now."""

    outcome: str
    state: str


class OperationStatus(FromObject):
    """An operation that a relay executes, batch by batch."""

    id: int
    state: str = Field(description="planned, running, or at its end finished, stopped or cancelled.")
    total: int = Field(description="How many messages it was planned for.")
    restored: int = Field(validation_alias="done")
    left: dict[str, int] = Field(validation_alias="reasons", description="How many messages were left as they are, by reason.")
    stopped_because: str
    planned_at: datetime
    ended_at: datetime | None


class MessageStatus(FromObject):
    """A message in the outbox, without its payload."""

    id: UUID = Field(validation_alias="message_id")
    topic: str
    biz_id: str
    key: str
    state: str
    attempts: int = Field(description="Failed attempts to publish it.")
    last_error: str
    created_at: datetime
    due_at: datetime = Field(validation_alias="available_at")
    expires_at: datetime | None
    settled_at: datetime | None = Field(description="When it was published, cancelled or expired.")


class Statuses(BaseModel):
    """The newest first."""

    messages: list[MessageStatus]

"""Fields of the bodies of requests. Unlike Pydantic by default, they do not turn a text into a number, or a number into an
instant."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

from exactly_once.wire.text import NAME_LENGTH

_LONGEST_SECONDS = timedelta(days=3650).total_seconds()


def _instant(value: object) -> datetime:
    if not isinstance(value, str):
        raise ValueError("it must be text, such as 2026-01-31T12:00:00Z")  # noqa: TRY004 - Pydantic's own protocol
    return datetime.fromisoformat(value)


class Body(BaseModel):
    """The body of a request. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid")


Name = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH)]
"""A topic, key or biz-id; also at most 255 bytes in UTF-8."""
Instant = Annotated[AwareDatetime, BeforeValidator(_instant)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=_LONGEST_SECONDS, allow_inf_nan=False)]
"""A duration."""
PositiveSeconds = Annotated[float, Field(strict=True, gt=0, le=_LONGEST_SECONDS, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]
Flag = Annotated[bool, Field(strict=True)]

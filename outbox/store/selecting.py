"""Select messages to restore, and messages of history to be sent again."""

import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet

from exactly_once.sql.days import FIRST_DAY
from outbox.models import OutboxMessage
from outbox.states import SETTLED

_EPOCH_ORDINAL = datetime(1970, 1, 1).toordinal()  # noqa: DTZ001 - only its date is used


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The messages in one of the `states` that meet all given conditions.

    Attributes:
        since, until: limits of the instant at which they were settled or became dead; `until` is exclusive.
    """

    states: Collection[str] = SETTLED
    message_ids: Collection[uuid.UUID] | None = None
    topic: str | None = None
    biz_id: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def messages(self, alias: str) -> QuerySet[OutboxMessage]:
        """They are not locked, so the result may be outdated."""
        wanted: dict[str, Any] = {
            "message_id__in": self.message_ids,
            "topic": self.topic,
            "biz_id": self.biz_id,
            "settled_at__gte": self.since,
            "settled_at__lt": self.until,
        }
        if set(self.states) <= set(SETTLED):
            # Whole partitions are left out. A row's day may differ from that of `settled_at` by a moment at midnight.
            wanted["day__gte"] = max(FIRST_DAY, _day(self.since) - 1) if self.since else FIRST_DAY
            wanted["day__lte"] = _day(self.until) + 1 if self.until else None
        given = {field: value for field, value in wanted.items() if value is not None}
        return OutboxMessage.objects.using(alias).filter(state__in=self.states, **given)

    def positions(self, alias: str) -> Iterator[int]:
        """Their positions, the oldest first, however many they are."""
        return self.messages(alias).order_by("pk").values_list("pk", flat=True).iterator(chunk_size=10_000)


def _day(instant: datetime) -> int:
    return (instant - (instant.utcoffset() or timedelta())).toordinal() - _EPOCH_ORDINAL

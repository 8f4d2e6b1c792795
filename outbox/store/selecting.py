"""Finding messages: by name, to restore them, or in history to send them again."""

import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections
from django.db.models import QuerySet

from exactly_once.sql.days import FIRST_DAY, LIVE
from outbox.models import OutboxMessage
from outbox.states import SETTLED
from outbox.store.dialect import TABLE, each_topic

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


def find(alias: str, name: Mapping[str, Any], *, everywhere: bool = False) -> dict[int, str]:
    """Position and state of the messages that have these values in their columns, the oldest first.

    History is searched only if no live message is found, or with `everywhere`: reading it locks it until the transaction ends.
    """
    chosen = OutboxMessage.objects.using(alias).filter(**name).order_by("pk").values_list("pk", "state")
    return (not everywhere and dict(chosen.filter(day=LIVE))) or dict(chosen)


def live_names(alias: str, topics: Collection[str], biz_ids: Collection[str]) -> list[tuple[str, str]]:
    """The topic and biz-id of each message that is not settled and has one of these topics and biz-ids."""
    rows = OutboxMessage.objects.using(alias).filter(day=LIVE, topic__in=topics, biz_id__in=biz_ids)
    return [*rows.order_by("topic", "biz_id").values_list("topic", "biz_id").distinct()]


def topics(alias: str, most: int = 10_000) -> list[str]:
    """The topics of all messages, up to a limit, in their order."""
    with connections[alias].cursor() as cursor:
        cursor.execute(f"{each_topic(f'{TABLE} m WHERE true')} LIMIT %s", [most])
        return [name for (name,) in cursor.fetchall()]

"""Finding messages: by name, to restore them, or in history to send them again."""

import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.db import connections
from django.db.models import QuerySet

from exactly_once.sql.connections import fetch
from exactly_once.sql.days import FIRST_DAY, LIVE, number_of
from exactly_once.sql.partitions import days_by, lately, on_all_days, soon_after
from outbox.models import OutboxMessage
from outbox.states import SETTLED
from outbox.store.dialect import TABLE, each_topic

_WITH_TIME = 7
"""The version of the UUIDs that are message ids."""


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
        return self.messages(alias).order_by("pk").values_list("pk", flat=True).iterator()


def _day(instant: datetime) -> int:
    return number_of(instant.astimezone(UTC).date())


def find(alias: str, name: Mapping[str, Any], *, everywhere: bool = False) -> dict[int, str]:
    """Position and state of the messages that have these values in their columns, the oldest first.

    History is searched only if no live message is found, or with `everywhere`: reading it locks it until the transaction ends.
    """
    rows = OutboxMessage.objects.using(alias)
    chosen = rows.filter(**name)
    live = {} if everywhere else dict(chosen.filter(day=LIVE).order_by("pk").values_list("pk", "state"))
    if live:
        return live
    if "message_id" in name:
        return dict(identified(alias, [name["message_id"]]).filter(**name).values_list("pk", "state"))
    return dict(sorted(on_all_days(chosen, "pk", "state").items()))


def identified(alias: str, message_ids: Collection[uuid.UUID], likely: Collection[int] = ()) -> QuerySet[OutboxMessage]:
    """The messages with these ids.

    Args:
        likely: their probable days; otherwise, soon after they were published, which the id says.
    """
    likely = likely or {day for name in message_ids if name.version == _WITH_TIME for day in soon_after(_instant(name))}
    rows = OutboxMessage.objects.using(alias)
    found = days_by(rows, "message_id", message_ids, likely)
    # Also where a message is that was settled or restored since.
    return rows.filter(message_id__in=found.keys(), day__in={*found.values(), *lately()})


def placed(
    alias: str, positions: Collection[int], *, unless: str | None = None, likely: Collection[int] = ()
) -> QuerySet[OutboxMessage]:
    """The messages at these positions, without those in the state `unless`.

    Args:
        likely: their probable days.
    """
    rows = OutboxMessage.objects.using(alias)
    if unless is not None:
        rows = rows.exclude(state=unless)
    found = days_by(rows, "pk", positions, likely)
    return rows.filter(pk__in=found.keys(), day__in={*found.values()})


def _instant(message_id: uuid.UUID) -> datetime:
    """When a UUIDv7 was made."""
    return datetime.fromtimestamp((message_id.int >> 80) / 1000, tz=UTC)


def first_id_of(day: int) -> uuid.UUID:
    """The least id of a message that was published on this day or later."""
    return uuid.UUID(int=day * 86_400_000 << 80)


def live_names(alias: str, topics: Collection[str], biz_ids: Collection[str]) -> list[tuple[str, str]]:
    """The topic and biz-id of each message that is not settled and has one of these topics and biz-ids."""
    rows = OutboxMessage.objects.using(alias).filter(day=LIVE, topic__in=topics, biz_id__in=biz_ids)
    return [*rows.order_by("topic", "biz_id").values_list("topic", "biz_id").distinct()]


def topics(alias: str, most: int = 10_000) -> list[str]:
    """The topics of all messages, up to a limit, in their order."""
    return [name for (name,) in fetch(connections[alias], f"{each_topic(f'{TABLE} m WHERE true')} LIMIT %s", [most])]

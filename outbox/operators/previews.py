"""What a restore or a replay would affect."""

from datetime import datetime
from typing import NamedTuple

from django.db.models import Count, Max, Min, Q

from exactly_once.sql.now import DatabaseTime
from outbox.models import IS_AHEAD
from outbox.store.selecting import Selection
from outbox.store.unique import IS_REPLACED


class Restorable(NamedTuple):
    """The messages of one topic and state that a restore would affect.

    Attributes:
        messages: their number.
        overdue: the number of those whose delivery time has passed; once restored, they are sent at once.
        oldest: when the first of them was cancelled, expired or became dead.
    """

    topic: str
    state: str
    messages: int
    overdue: int
    oldest: datetime | None


class Replayable(NamedTuple):
    """The selected messages of one topic and state.

    Attributes:
        messages: their number.
        expired: the number of those that have expired since, and are not sent again.
        oldest, newest: when the first and the last of them was settled.
    """

    topic: str
    state: str
    messages: int
    expired: int
    oldest: datetime
    newest: datetime


def preview_restoring(alias: str, selection: Selection) -> list[Restorable]:
    """The messages that a restore would affect, by topic and state."""
    groups = selection.messages(alias).exclude(IS_REPLACED).order_by("topic", "state").values_list("topic", "state")
    return [
        Restorable(topic, state, count, count - ahead, oldest)
        for topic, state, count, ahead, oldest in groups.annotate(
            Count("id"), ahead=Count("id", filter=IS_AHEAD), oldest=Min("settled_at")
        )
    ]


def preview_replaying(alias: str, selection: Selection) -> list[Replayable]:
    """The selected messages, by topic and state."""
    expired = Count("id", filter=Q(expires_at__lte=DatabaseTime()))
    groups = selection.messages(alias).order_by("topic", "state").values_list("topic", "state")
    counted = groups.annotate(Count("id"), expired=expired, oldest=Min("settled_at"), newest=Max("settled_at"))
    return [Replayable._make(group) for group in counted]

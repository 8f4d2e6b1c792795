"""What became of messages after an operator's decision about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from outbox.models import OutboxMessage
from outbox.states import IN_TROUBLE, State

_NAMED = ("pk", "state", "message_id", "topic", "biz_id")


def names_of(alias: str, rows: Sequence[int]) -> dict[int, str]:
    """The names of these messages, for reports."""
    return {
        row: f"{message_id} ({topic} {biz_id})"
        for row, _, message_id, topic, biz_id in OutboxMessage.objects.using(alias).filter(pk__in=rows).values_list(*_NAMED)
    }


def states_of(alias: str, rows: Sequence[int]) -> dict[int, str]:
    """The states of these messages, by position."""
    return dict(OutboxMessage.objects.using(alias).filter(pk__in=rows).values_list("pk", "state"))


def failures_of(alias: str, rows: Sequence[int]) -> dict[int, str]:
    """What these messages failed with."""
    found = OutboxMessage.objects.using(alias).filter(pk__in=rows).values_list("pk", "error_class", "topic")
    return {row: f"{kind} {topic}".strip() for row, kind, topic in found}


@dataclass(frozen=True, kw_only=True)
class Since:
    """What has become of some messages since an instant: sent, failed, or neither yet."""

    pending: Sequence[int]
    succeeded: Sequence[int]
    failed: Mapping[int, str]


def since(alias: str, rows: Sequence[int], instant: datetime) -> Since:
    """What has become of these messages since `instant`, by the database's clock. A deleted one was published."""
    found = states_of(alias, rows)
    in_trouble = OutboxMessage.objects.using(alias).filter(pk__in=rows, state__in=IN_TROUBLE, failed_at__gte=instant)
    failed = failures_of(alias, list(in_trouble.values_list("pk", flat=True)))
    over = {State.PUBLISHED, State.CANCELLED, State.EXPIRED, State.SCHEDULED}
    succeeded = [row for row in rows if found.get(row, State.PUBLISHED) in over]
    settled = {*succeeded, *failed}
    return Since(pending=[row for row in rows if row not in settled], succeeded=succeeded, failed=failed)

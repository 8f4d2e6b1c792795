"""An operator's decision about many messages, and what became of them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import connections

from exactly_once.sql.connections import is_postgresql
from outbox.models import OutboxMessage
from outbox.states import IN_TROUBLE, State, Transition
from outbox.store.transitions import move

_NAMED = ("pk", "state", "message_id", "topic", "biz_id")


def names_of(alias: str, rows: Sequence[int]) -> dict[int, str]:
    """The names of these messages, for reports."""
    return {
        row: f"{message_id} ({topic} {biz_id})"
        for row, _, message_id, topic, biz_id in OutboxMessage.objects.using(alias).filter(pk__in=rows).values_list(*_NAMED)
    }


def decide_some(
    alias: str,
    transition: Transition,
    rows: Sequence[int],
    *,
    sources: Collection[str],
    one: Callable[[str, int], bool],
    reason: str,
) -> set[int]:
    """Apply a transition to the messages in one of the `sources`; the changed ones. Inside an open transaction.

    Args:
        one: the transition of a single ready message, which waits for the relay's pass over its shard.
    """
    messages = OutboxMessage.objects.using(alias).filter(pk__in=rows)
    changed: set[int] = set()
    if State.READY in sources:
        # First and by shard, so that two operations take the locks of shards in one order, before they lock any row.
        ready = messages.filter(state=State.READY).order_by("shard", "pk").values_list("pk", flat=True)
        changed = {row for row in ready if one(alias, row)}
    only = [source for source in transition.sources if source in sources and source is not State.READY]
    # What another transaction has locked is not waited for.
    locked = (
        messages.filter(state__in=only).exclude(pk__in=changed).select_for_update(skip_locked=is_postgresql(connections[alias]))
    )
    rest = list(locked.order_by("pk").values_list("pk", flat=True))
    changed.update(moved.position for moved in move(alias, transition, rest, only=only, reason=reason))
    return changed


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

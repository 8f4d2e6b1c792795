"""Restore cancelled, expired, dead or retrying messages; their ids stay the same."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from asgiref.sync import sync_to_async
from django.db import DEFAULT_DB_ALIAS, transaction

from outbox import doorbell
from outbox.decisions import BUSINESS, named, refuse_unfit
from outbox.errors import InvalidMessage
from outbox.states import RESTORE
from outbox.store import operating
from outbox.store.dialect import chunks
from outbox.store.restoring import Restored, restore_some, restored_by_default
from outbox.store.selecting import Selection

_AT_ONCE = 500


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """What was restored; true unless it was nothing.

    Attributes:
        restored: how many messages.
        left: how many were left as they are, by reason: the state they are in; "overdue", when those were not wanted;
            "replaced", when a message was published with `unique=True` and another one since under its topic and biz-id;
            "locked", when another transaction is changing the message, or publishing such another one, at this moment.
    """

    restored: int
    left: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.restored > 0


def restore(
    message_id: uuid.UUID | str | None = None,
    *,
    topic: str | None = None,
    biz_id: str | None = None,
    states: Collection[str] | None = None,
    overdue: bool = True,
    by: str = BUSINESS,
    using: str = DEFAULT_DB_ALIAS,
) -> Restoration:
    """Have messages published after all: one by its id, all with this topic and biz-id, or all of a topic.

    Those whose time is ahead are scheduled for it again, the others are overdue and go out at once. They have a full set of
    attempts, and last as long again until they expire. In the transaction that is open on `using`; without one, in as many as
    it takes, so that all of a topic is best restored outside of one. What another transaction is changing is waited for, at
    most ten seconds.

    Args:
        states: of messages in these states only. Default: cancelled, expired, dead; and retrying, if it is named by its id.
        overdue: False: only those whose time is ahead.
        by: who decides, for the trail.

    Raises:
        UnknownMessage: it is named by its id and otherwise, or by a biz-id without its topic, or by what can be no name.
        InvalidMessage: there are `states` among these that nothing can be restored from.
    """
    if states is None:
        states = restored_by_default(by_id=message_id is not None)
    if strange := set(states).difference(RESTORE.sources):
        raise InvalidMessage(
            f"states has {', '.join(sorted(strange))}: only {', '.join(RESTORE.sources)} messages can be restored."
        )
    if topic is not None and message_id is None and biz_id is None:
        refuse_unfit(topic=topic)
        positions: Iterable[int] = list(Selection(topic=topic, states=states).positions(using))
    else:
        positions = operating.find(using, named(message_id, topic, biz_id), everywhere=True)
    restored, left = 0, Counter[str]()
    for some in restoring(using, positions, states=states, overdue=overdue, reason=f"restore() by {by}"):
        restored += some.ready + some.scheduled
        left.update(some.left)
    return Restoration(restored=restored, left=dict(left))


arestore = sync_to_async(restore)
"""`restore` for async code, see `outbox.acancel`."""


def restoring(
    alias: str,
    positions: Iterable[int],
    *,
    states: Collection[str],
    overdue: bool,
    reason: str,
    audit: Callable[[Restored], None] | None = None,
) -> Iterator[Restored]:
    """Restore many, in short transactions, and wake the relays for what is ready.

    Args:
        audit: called in each of the transactions.
    """
    for chunk in chunks(positions, _AT_ONCE):
        with transaction.atomic(using=alias):
            restored = restore_some(alias, chunk, states=states, overdue=overdue, reason=reason)
            if audit is not None and (restored.ready or restored.scheduled):
                audit(restored)
            if restored.ready:
                doorbell.ring_after_commit(alias)
        yield restored

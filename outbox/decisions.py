"""Decisions about a message after `publish()`: cancel it, reschedule it, publish it now, or restore it.

Each is one guarded UPDATE in the caller's own transaction, so it commits together with the business change or not at all. If a
relay has claimed the message, the call waits for the relay's pass and returns the state that results. Many are restored in
transactions of some hundreds, unless one is open. The id of a restored message stays the same.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from asgiref.sync import sync_to_async
from django.db import DEFAULT_DB_ALIAS, transaction

from exactly_once.states import Transition
from exactly_once.wire.text import why_unfit
from outbox import doorbell
from outbox.api import due
from outbox.errors import InvalidMessage, UnknownMessage
from outbox.states import CANCEL, PUBLISH_NOW, RESCHEDULE, RESTORE
from outbox.store import operating
from outbox.store.dialect import chunks
from outbox.store.restoring import Restored, restore_some, restored_by_default
from outbox.store.selecting import Selection

_RESTORED_AT_ONCE = 500
BUSINESS = "the business"
"""Who decides, if the caller does not say."""


class Outcome(StrEnum):
    """The outcome of `cancel`, `reschedule` and `publish_now`."""

    CANCELLED = "cancelled"
    """No relay will publish it."""
    RESCHEDULED = "rescheduled"
    """It is due at its new time, or now."""
    TOO_LATE = "too_late"
    """Nothing was changed: its state does not allow it, or a relay has claimed it."""
    NOT_FOUND = "not_found"
    """Nothing was changed: the message is not in the outbox. It was never published, or has been purged."""


@dataclass(frozen=True)
class Decision:
    """The result of `cancel`, `reschedule` and `publish_now`; true if and only if the message was changed.

    Attributes:
        outcome: what was done, or why nothing was.
        state: the present state of the message; "" with `Outcome.NOT_FOUND`.
    """

    outcome: Outcome
    state: str

    def __bool__(self) -> bool:
        return self.outcome in {Outcome.CANCELLED, Outcome.RESCHEDULED}


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


def cancel(
    message_id: uuid.UUID | str | None = None,
    *,
    topic: str | None = None,
    biz_id: str | None = None,
    by: str = BUSINESS,
    using: str = DEFAULT_DB_ALIAS,
) -> Decision:
    """Cancel a message before it is published: one by its id, or all unpublished ones with this topic and biz-id.

    Either all of them are cancelled or none: if a relay or another transaction has locked one of them, the others stay
    unchanged, too.

    It runs in the transaction that is open on `using`, or in its own. A relay may have claimed a ready message: the call waits
    for the relay, at most ten seconds. From then on until the transaction ends, no relay sends the message or a later one of
    its key, so keep the transaction short. On SQLite the single writer would wait for itself, so the call does not wait: its
    outcome is `TOO_LATE`, and the state is `ready`.

    Args:
        by: who decides, for the trail.

    Raises:
        UnknownMessage: the arguments are neither an id nor a topic with a biz-id, or both, or invalid.
    """
    return _decide(CANCEL, Outcome.CANCELLED, named(message_id, topic, biz_id), using, f"cancel() by {by}")


def reschedule(
    message_id: uuid.UUID | str | None = None,
    *,
    topic: str | None = None,
    biz_id: str | None = None,
    delay: timedelta | str | None = None,
    deliver_at: datetime | None = None,
    by: str = BUSINESS,
    using: str = DEFAULT_DB_ALIAS,
) -> Decision:
    """Change the time before which an unpublished message is not delivered; it is identified as for `cancel`.

    The time between its due time and its expiry stays the same. Its attempts start again at zero. A message behind a failed one
    of its key still waits for that one.

    Args:
        delay, deliver_at: one of them, as for `publish`.
        by: who decides, for the trail.

    Raises:
        UnknownMessage: see `cancel`.
        InvalidMessage: no time is given, more than one, or an invalid one.
    """
    at = due(delay, deliver_at)
    if at is None:
        raise InvalidMessage("reschedule() needs a time: give delay or deliver_at, or call publish_now().")
    transition = RESCHEDULE if at else PUBLISH_NOW
    reason = f"reschedule() by {by}"
    return _decide(transition, Outcome.RESCHEDULED, named(message_id, topic, biz_id), using, reason, at or None)


def publish_now(
    message_id: uuid.UUID | str | None = None,
    *,
    topic: str | None = None,
    biz_id: str | None = None,
    by: str = BUSINESS,
    using: str = DEFAULT_DB_ALIAS,
) -> Decision:
    """`reschedule` to now: a delayed or retrying message is sent as soon as the transaction commits."""
    return _decide(PUBLISH_NOW, Outcome.RESCHEDULED, named(message_id, topic, biz_id), using, f"publish_now() by {by}")


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


acancel = sync_to_async(cancel)
"""`cancel` for async code. It runs in the transaction of the async handler, or of the synchronous code that called it with
`async_to_sync`; elsewhere, as in an async view, in its own."""
areschedule = sync_to_async(reschedule)
"""`reschedule` for async code, see `acancel`."""
apublish_now = sync_to_async(publish_now)
"""`publish_now` for async code, see `acancel`."""
arestore = sync_to_async(restore)
"""`restore` for async code, see `acancel`."""


def named(message_id: uuid.UUID | str | None, topic: str | None, biz_id: str | None) -> Mapping[str, Any]:
    """The columns that identify the messages: one by its id, or those with this topic and biz-id.

    Raises:
        UnknownMessage: the arguments are neither an id nor a topic with a biz-id, or both, or invalid.
    """
    if message_id is not None and topic is None and biz_id is None:
        try:
            name = message_id if isinstance(message_id, uuid.UUID) else uuid.UUID(message_id)
        except (ValueError, AttributeError, TypeError):
            raise UnknownMessage(
                f"{message_id!r} is not a message id: it must be a UUID, the `id` of a PublishedMessage."
            ) from None
        return {"message_id": name}
    if message_id is None and topic is not None and biz_id is not None:
        refuse_unfit(topic=topic, biz_id=biz_id)
        return {"topic": topic, "biz_id": biz_id}
    raise UnknownMessage("Identify the message either by its message_id, or by topic and biz_id together.")


def refuse_unfit(**names: str) -> None:
    """Raises UnknownMessage if no message can have these names; a database would refuse them."""
    for argument, name in names.items():
        if reason := why_unfit(str(name)):
            raise UnknownMessage(f"No message has the {argument} {str(name)[:80]!r}: {reason}.")


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
    for chunk in chunks(positions, _RESTORED_AT_ONCE):
        with transaction.atomic(using=alias):
            restored = restore_some(alias, chunk, states=states, overdue=overdue, reason=reason)
            if audit is not None and (restored.ready or restored.scheduled):
                audit(restored)
            if restored.ready:
                doorbell.ring_after_commit(alias)
        yield restored


def _decide(
    transition: Transition,
    done: Outcome,
    which: Mapping[str, Any],
    using: str,
    reason: str,
    due: timedelta | datetime | None = None,
) -> Decision:
    with transaction.atomic(using=using):
        positions = operating.find(using, which)
        changed = operating.decide(using, transition, [*positions], reason=reason, due=due)
        states = operating.find(using, which)
        if not positions.keys() <= states.keys():
            states = operating.find(using, which, everywhere=True)  # some of them are history by now
        states = {position: states[position] for position in sorted(positions, reverse=True) if position in states}
        left = [state for position, state in states.items() if position not in changed and state in transition.sources]
        if changed and not left:
            # Later messages of its key may have waited for a cancelled one.
            doorbell.ring_if_soon(using, due)
            return Decision(done, states[max(changed)])
        # Undo the changes: the outcome says that nothing was changed.
        transaction.set_rollback(True, using=using)
    if not states:
        return Decision(Outcome.NOT_FOUND, "")
    return Decision(Outcome.TOO_LATE, next(iter(left or states.values())))

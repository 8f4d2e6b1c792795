"""Decisions about a message after `publish()`: cancel it, reschedule it, publish it now, or restore it.

Each is a guarded change in the caller's own transaction, so it commits together with the business change or not at all. If a
relay has claimed the message, the call waits for the relay's pass and returns the state that results. The id of a restored
message stays the same.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from asgiref.sync import sync_to_async
from django.db import transaction

from exactly_once.states import Transition
from exactly_once.wire.text import why_unfit
from outbox.api import due
from outbox.errors import InvalidMessage, UnknownMessage
from outbox.states import CANCEL, PUBLISH_NOW, RESCHEDULE, RESTORE
from outbox.store import decision_rows
from outbox.store.decision_rows import DELETED, LOCKED, WHY, why
from outbox.store.dialect import database_of
from outbox.store.restoring import restored_by_default
from outbox.store.selecting import find


class Outcome(StrEnum):
    """The outcome of a decision."""

    CANCELLED = "cancelled"
    """No relay will publish it."""
    RESCHEDULED = "rescheduled"
    """It is due at its new time, or now."""
    RESTORED = "restored"
    """It is published after all: at its time, or now."""
    COMMITTED = "committed"
    """The effect of the prepared message has happened: it is published at its time, or now."""
    ROLLED_BACK = "rolled_back"
    """The effect of the prepared message has not happened: no relay will publish it."""
    TOO_LATE = "too_late"
    """Nothing was changed: its state, or a later unique message, does not allow it, or another transaction has locked it."""
    NOT_FOUND = "not_found"
    """Nothing was changed: the message is not in the outbox. It was never published, or has been purged."""


@dataclass(frozen=True)
class Decision:
    """The answer of each function that decides about messages; true if and only if it has changed them.

    Attributes:
        outcome: what was done, or why nothing was.
        state: the present state of the message, or of the newest one that was changed; "" with `Outcome.NOT_FOUND`.
        why: with `Outcome.TOO_LATE`, what prevented it, for people.
        changed: the positions of the messages that it has changed.
    """

    outcome: Outcome
    state: str
    why: str = field(default="", compare=False)
    changed: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def __bool__(self) -> bool:
        return self.outcome not in {Outcome.TOO_LATE, Outcome.NOT_FOUND}


def cancel(
    message_id: uuid.UUID | str | None = None,
    *,
    topic: str | None = None,
    biz_id: str | None = None,
    by: str = "",
    using: str | None = None,
) -> Decision:
    """Cancel a message before it is published: one by its id, or all unpublished ones with this topic and biz-id.

    Either all of them are cancelled or none: if a relay or another transaction has locked one of them, the others stay
    unchanged, too.

    It runs in the transaction that is open on `using`, or in its own. A relay may have claimed a ready message: the call waits
    for the relay, at most ten seconds. From then on until the transaction ends, no relay sends the message or a later one of
    its key, so keep the transaction short. On SQLite the single writer would wait for itself, so the call does not wait: its
    outcome is `TOO_LATE`, and the state is `ready`.

    Args:
        by: who decides, for the trail; default: this process.

    Raises:
        UnknownMessage: the arguments are neither an id nor a topic with a biz-id, or both, or invalid.
    """
    return decide(CANCEL, Outcome.CANCELLED, named(message_id, topic, biz_id), using, said("cancel", by))


def reschedule(
    message_id: uuid.UUID | str | None = None,
    *,
    topic: str | None = None,
    biz_id: str | None = None,
    delay: timedelta | str | None = None,
    deliver_at: datetime | None = None,
    by: str = "",
    using: str | None = None,
) -> Decision:
    """Change the time before which an unpublished message is not delivered; it is identified as for `cancel`.

    The time between its due time and its expiry stays the same. Its attempts start again at zero. A message behind a failed one
    of its key still waits for that one.

    Args:
        delay, deliver_at: one of them, as for `publish`.
        by: who decides, for the trail; default: this process.

    Raises:
        UnknownMessage: see `cancel`.
        InvalidMessage: no time is given, more than one, or an invalid one.
    """
    at = due(delay, deliver_at)
    if at is None:
        raise InvalidMessage("reschedule() needs a time: give delay or deliver_at, or call publish_now().")
    transition = RESCHEDULE if at else PUBLISH_NOW
    names, reason = named(message_id, topic, biz_id), said("reschedule", by)
    return decide(transition, Outcome.RESCHEDULED, names, using, reason, due=at or None)


def publish_now(
    message_id: uuid.UUID | str | None = None,
    *,
    topic: str | None = None,
    biz_id: str | None = None,
    by: str = "",
    using: str | None = None,
) -> Decision:
    """`reschedule` to now: a delayed or retrying message is sent as soon as the transaction commits."""
    return decide(PUBLISH_NOW, Outcome.RESCHEDULED, named(message_id, topic, biz_id), using, said("publish_now", by))


def restore(
    message_id: uuid.UUID | str | None = None,
    *,
    topic: str | None = None,
    biz_id: str | None = None,
    states: Collection[str] | None = None,
    overdue: bool = True,
    by: str = "",
    using: str | None = None,
) -> Decision:
    """Have messages published after all: one by its id, or all with this topic and biz-id.

    Those whose time is ahead are scheduled for it again, the others are overdue and go out at once. They have a full set of
    attempts, and last as long again until they expire. Otherwise as `cancel`. The command `outbox_restore` restores any number.

    Args:
        states: of messages in these states only. Default: cancelled, expired, dead; and retrying, if it is named by its id.
        overdue: False: only those whose time is ahead.
        by: who decides, for the trail; default: this process.

    Raises:
        UnknownMessage: see `cancel`.
        InvalidMessage: there are `states` among these that nothing can be restored from.
    """
    if states is None:
        states = restored_by_default(by_id=message_id is not None)
    if not states or not set(states).issubset(RESTORE.sources):
        raise InvalidMessage(f"states is {states!r}: it must be a list of {', '.join(RESTORE.sources)}.")
    names, reason = named(message_id, topic, biz_id), said("restore", by)
    return decide(RESTORE, Outcome.RESTORED, names, using, reason, states=states, overdue=overdue)


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
                f"{message_id!r} is not a message id, a UUID: give the `id` of a PublishedMessage, or topic and biz_id."
            ) from None
        return {"message_id": name}
    if message_id is None and topic is not None and biz_id is not None:
        refuse_unfit(topic=topic, biz_id=biz_id)
        return {"topic": topic, "biz_id": biz_id}
    raise UnknownMessage(f"Give either message_id, or both topic and biz_id, not {message_id=}, {topic=}, {biz_id=}.")


def refuse_unfit(**names: str) -> None:
    """Raises UnknownMessage if no message can have these names; a database would refuse them."""
    for argument, name in names.items():
        if reason := why_unfit(str(name)):
            raise UnknownMessage(f"No message has the {argument} {str(name)[:80]!r}: {reason}.")


def said(function: str, by: str) -> str:
    """The reason for the trail, which also has the process."""
    return f"{function}() by {by}" if by else f"{function}()"


def decide(
    transition: Transition,
    done: Outcome,
    which: Mapping[str, Any],
    using: str | None,
    reason: str,
    *,
    due: datetime | timedelta | None = None,
    states: Collection[str] | None = None,
    overdue: bool = True,
) -> Decision:
    """Make the transition of all messages with these columns whose state allows it, or of none if one of them is locked."""
    alias = database_of(using)
    with transaction.atomic(using=alias):
        found = find(alias, which, everywhere=transition is RESTORE)
        decided = decision_rows.decide(
            alias, transition, [*found], which=which, sources=states, reason=reason, due=due, overdue=overdue
        )
        locked = [position for position, left in decided.left.items() if left == LOCKED]
        if decided and not locked:
            return Decision(done, decided.became[max(decided.became)], changed=tuple(decided.became))
        # Undo the changes: the outcome says that nothing was changed.
        transaction.set_rollback(True, using=alias)
    left = {position: left for position, left in decided.left.items() if left != DELETED}
    if not left:
        return Decision(Outcome.NOT_FOUND, "")
    cause = max(locked or left)
    reason = left[cause]
    state = find(alias, which).get(cause, found[cause]) if reason in WHY else reason
    return Decision(Outcome.TOO_LATE, state, why(reason))

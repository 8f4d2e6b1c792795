"""Changing one's mind about a message that was published: cancel it, put it off, have it go now.

All of it is one guarded UPDATE in the caller's own transaction, so it comes true together with the business change it belongs
to, or not at all. The answer is honest: a message that a relay has in hand is waited for, and what it did is what is told.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial

from asgiref.sync import sync_to_async
from django.db import DEFAULT_DB_ALIAS, transaction

from outbox import doorbell, store
from outbox.api import due
from outbox.errors import InvalidMessage, UnknownMessage
from outbox.kernel.text import why_unfit
from outbox.states import CANCEL, RESCHEDULE


class Outcome(StrEnum):
    """What `cancel`, `reschedule` and `publish_now` did."""

    CANCELLED = "cancelled"
    """No relay will publish it."""
    RESCHEDULED = "rescheduled"
    """It is due at its new time, or now."""
    TOO_LATE = "too_late"
    """Nothing was changed: its state does not allow it, or a relay has it in hand."""
    NOT_FOUND = "not_found"
    """Nothing was changed: the outbox has no message of that name. It may never have been published, or have been purged."""


@dataclass(frozen=True)
class Decision:
    """What `cancel`, `reschedule` and `publish_now` return; true if and only if it was done.

    Attributes:
        outcome: what was done, or why nothing was.
        state: the state that the message is in now; "" with `Outcome.NOT_FOUND`.
    """

    outcome: Outcome
    state: str

    def __bool__(self) -> bool:
        return self.outcome in {Outcome.CANCELLED, Outcome.RESCHEDULED}


def cancel(
    message_id: uuid.UUID | str | None = None,
    *,
    topic: str | None = None,
    biz_id: str | None = None,
    using: str = DEFAULT_DB_ALIAS,
) -> Decision:
    """Have a message not published: by its id, or all that have this topic and biz-id and are still to be published.

    All of these or none: when a relay or another transaction has one of them in hand, the others stay as they are, too.

    In the transaction that is open on `using`, or else in one of its own. A message that is ready may be in a relay's hands:
    that is waited for, at most ten seconds, and from then on until the transaction ends no relay looks into its shard, so keep
    the transaction short. On SQLite, whose one writer would wait for itself, it is too late, and its state `ready`.

    Raises:
        UnknownMessage: it is named neither by its id nor by topic and biz-id, or by both, or by what can be no name.
    """
    change = partial(store.cancel, reason="cancel() by the business")
    with transaction.atomic(using=using):
        decision = _decide(change, Outcome.CANCELLED, CANCEL.sources, named(message_id, topic, biz_id), using)
        if decision:
            # It may have held back later messages of its key.
            doorbell.ring_after_commit(using)
    return decision


def reschedule(
    message_id: uuid.UUID | str | None = None,
    *,
    topic: str | None = None,
    biz_id: str | None = None,
    delay: timedelta | None = None,
    delay_level: str | int | None = None,
    deliver_at: datetime | None = None,
    using: str = DEFAULT_DB_ALIAS,
) -> Decision:
    """Deliver a message that is still to be published no earlier than then; named as for `cancel`.

    The time that it had from being due until it expires, it has again. Its attempts begin anew. A message behind a failed one
    of its key still waits for that.

    Args:
        delay, delay_level, deliver_at: one of them, as for `publish`.

    Raises:
        UnknownMessage: see `cancel`.
        InvalidMessage: the time is none, or several.
    """
    at = due(delay, delay_level, deliver_at)
    if at is None:
        raise InvalidMessage(
            "reschedule() was not told for when: give delay, delay_level or deliver_at, or call publish_now()."
        )
    return _reschedule(named(message_id, topic, biz_id), at, using, "reschedule()")


def publish_now(
    message_id: uuid.UUID | str | None = None,
    *,
    topic: str | None = None,
    biz_id: str | None = None,
    using: str = DEFAULT_DB_ALIAS,
) -> Decision:
    """`reschedule` to now: what is delayed or rests after a failure goes out as soon as the transaction has committed."""
    return _reschedule(named(message_id, topic, biz_id), timedelta(), using, "publish_now()")


acancel = sync_to_async(cancel)
"""`cancel` for async code: in the transaction of the async handler, or of the synchronous code that called it with
`async_to_sync`; elsewhere, as in an async view, in one of its own."""
areschedule = sync_to_async(reschedule)
"""`reschedule` for async code, see `acancel`."""
apublish_now = sync_to_async(publish_now)
"""`publish_now` for async code, see `acancel`."""

_Find = Callable[[str], list[int]]


def named(message_id: uuid.UUID | str | None, topic: str | None, biz_id: str | None) -> _Find:
    """What finds the messages of this name: one by its id, or those with this topic and biz-id.

    Raises:
        UnknownMessage: it is neither, or both, or no name that a message can have.
    """
    if message_id is not None and topic is None and biz_id is None:
        try:
            name = message_id if isinstance(message_id, uuid.UUID) else uuid.UUID(message_id)
        except (ValueError, AttributeError, TypeError):
            raise UnknownMessage(
                f"{message_id!r} is no message id: it must be a UUID, the `id` of a PublishedMessage."
            ) from None
        return partial(store.identified, message_id=name)
    if message_id is None and topic is not None and biz_id is not None:
        refuse_unfit(topic=topic, biz_id=biz_id)
        return partial(store.named, topic=topic, biz_id=biz_id)
    raise UnknownMessage("Name the message by its message_id, or by topic and biz_id together; not by both, and not by less.")


def refuse_unfit(**names: str) -> None:
    """Raises UnknownMessage when no message can have these names, and a database would not take them."""
    for argument, name in names.items():
        if reason := why_unfit(str(name)):
            raise UnknownMessage(f"No message has the {argument} {str(name)[:80]!r}: {reason}.")


def _reschedule(find: _Find, at: timedelta | datetime, using: str, called: str) -> Decision:
    change = partial(store.reschedule, due=at, reason=f"{called} by the business")
    with transaction.atomic(using=using):
        decision = _decide(change, Outcome.RESCHEDULED, RESCHEDULE.sources, find, using)
        if decision:
            doorbell.ring_if_soon(using, at)
    return decision


def _decide(
    change: Callable[[str, int], bool], done: Outcome, open_states: Collection[str], find: _Find, using: str
) -> Decision:
    with transaction.atomic(using=using):
        positions = find(using)
        changed = [position for position in positions if change(using, position)]
        states = store.states_of(using, positions)
        left = [state for position, state in states.items() if position not in changed and state in open_states]
        if changed and not left:
            return Decision(done, states[changed[-1]])
        # Those that were changed stay as they were: the answer says that nothing was done.
        transaction.set_rollback(True, using=using)
    if not states:
        return Decision(Outcome.NOT_FOUND, "")
    return Decision(Outcome.TOO_LATE, next(iter(left or states.values())))

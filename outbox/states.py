"""The states of an outbox message and all transitions between them, each declared once, as data.

`store.transitions` executes them. The API, the relay, the admin, the commands and the table of states in the documentation use
these declarations, so a transition has the same effect in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Case, F, TextChoices, Value, When
from django.utils.translation import gettext_lazy as _

from exactly_once.sql.days import LIVE, Today
from outbox.expressions import (
    IS_AHEAD,
    NO_FAILURE,
    NOW,
    ONE_MORE_ATTEMPT,
    MarkedAsReplayed,
    after,
    failed,
    instant,
    same_time_to_expiry,
)


class State(TextChoices):
    """The state of a message."""

    PREPARED = "prepared", _("Prepared")
    STUCK = "stuck", _("Stuck")
    SCHEDULED = "scheduled", _("Scheduled")
    READY = "ready", _("Ready")
    RETRYING = "retrying", _("Retrying")
    WAITING = "waiting", _("Waiting")
    PAUSED = "paused", _("Paused")
    PUBLISHED = "published", _("Published")
    DEAD = "dead", _("Dead")
    EXPIRED = "expired", _("Expired")
    CANCELLED = "cancelled", _("Cancelled")
    ROLLED_BACK = "rolled_back", _("Rolled back")


IN_TROUBLE = (State.RETRYING, State.DEAD)
"""States in which a message has failed. Later messages of its key become *waiting*."""

HOLDING_KEY = (*IN_TROUBLE, State.PAUSED, State.WAITING)
"""States in which a message blocks the later ones of its key."""

SETTLED = (State.PUBLISHED, State.EXPIRED, State.CANCELLED, State.ROLLED_BACK)
"""States without an automatic next step, whose messages are history. A transition into one of them sets `day` to the present
day; a transition out of them sets it to `LIVE`."""

GIVEN_UP = (State.EXPIRED, State.CANCELLED, State.ROLLED_BACK)
"""States of a message that was not published, and is not published without an operator. Another message with its topic and
biz-id can be published with `unique=True`."""

UNDECIDED = (State.PREPARED, State.STUCK)
"""States in which it is not known whether the effect of a prepared message has happened."""


def _nothing() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A transition from some states to others.

    Attributes:
        sources: the states that it leads from. A row in any other state is not changed.
        targets: the state that it leads to; two states if the database's clock decides between them.
        when: its cause, for the documentation.
        columns: returns the values or expressions that it writes, by column, without the state. Its parameters are those of an
            execution.
        state: the expression that chooses between two targets.
        recorded: whether the trail records it with `OUTBOX["TRAIL"] = "decisions"`. With "all" every transition is recorded.
    """

    name: str
    sources: tuple[State, ...]
    targets: tuple[State, ...]
    when: str
    columns: Callable[..., Mapping[str, Any]] = _nothing
    state: Case | None = None
    recorded: bool = True


_SCHEDULED_OR_READY = Case(When(IS_AHEAD, then=Value(State.SCHEDULED.value)), default=Value(State.READY.value))
_DUE = Case(When(IS_AHEAD, then=F("deliver_at")), default=NOW)


# By the relay, for messages that it has claimed.

CONFIRM = Transition(
    name="confirm",
    sources=(State.READY,),
    targets=(State.PUBLISHED,),
    when="the broker confirmed it",
    columns=lambda: {"attempts": ONE_MORE_ATTEMPT, "last_error": "", **NO_FAILURE, "settled_at": NOW, "day": Today()},
    recorded=False,
)
RETRY = Transition(
    name="retry",
    sources=(State.READY,),
    targets=(State.RETRYING,),
    when="nacked or refused, with attempts left; or unroutable; or the broker forbids its topic",
    columns=lambda error, error_class, delay: {
        "attempts": ONE_MORE_ATTEMPT,
        "last_error": error,
        **failed(error_class),
        "available_at": after(delay),
    },
)
PAUSE = Transition(
    name="pause",
    sources=(State.READY,),
    targets=(State.PAUSED,),
    when="its topic is [paused](how-to/paused-topics.md)",
    recorded=False,
)
DIE = Transition(
    name="die",
    sources=(State.READY,),
    targets=(State.DEAD,),
    when="nacked or refused, attempts used up; or its row is damaged",
    columns=lambda error, error_class: {
        "attempts": ONE_MORE_ATTEMPT,
        "last_error": error,
        **failed(error_class),
        "settled_at": NOW,
    },
)
EXPIRE = Transition(
    name="expire",
    sources=(State.READY,),
    targets=(State.EXPIRED,),
    when="its `expires_in` ran out",
    columns=lambda: {"settled_at": NOW, "day": Today()},
)
HOLD = Transition(
    name="hold",
    sources=(State.READY,),
    targets=(State.WAITING,),
    when="an earlier message of its key is `retrying`, `dead`, `paused` or `waiting`",
    recorded=False,
)

# By the relay, for messages that become due, are resumed or are no longer blocked.

FIRE = Transition(
    name="fire",
    sources=(State.SCHEDULED,),
    targets=(State.READY,),
    when="it is due",
    recorded=False,
)
TRY_AGAIN = Transition(
    name="try again",
    sources=(State.RETRYING,),
    targets=(State.READY,),
    when="its backoff has ended",
    recorded=False,
)
RESUME = Transition(
    name="resume",
    sources=(State.PAUSED,),
    targets=(State.READY,),
    when="its topic is resumed, or it is a probe of its topic",
    columns=lambda: {"available_at": NOW},
    recorded=False,
)
RELEASE = Transition(
    name="release",
    sources=(State.WAITING,),
    targets=(State.READY,),
    when="no earlier message of its key is `retrying`, `dead` or `paused` any more",
    columns=lambda: {"available_at": NOW},
    recorded=False,
)

# By the code that published it, or an operator.

CANCEL = Transition(
    name="cancel",
    sources=(State.SCHEDULED, State.READY, State.RETRYING, State.WAITING, State.PAUSED, State.DEAD),
    targets=(State.CANCELLED,),
    when="`cancel()`, or an operator",
    columns=lambda: {"settled_at": NOW, "day": Today()},
)


def _rescheduled(due: datetime | timedelta) -> Mapping[str, Any]:
    at = instant(due)
    return {"attempts": 0, "deliver_at": at, "available_at": at, "expires_at": same_time_to_expiry(at)}


_NOT_STARTED = (State.SCHEDULED, State.READY, State.RETRYING, State.WAITING, State.PAUSED)
RESCHEDULE = Transition(
    name="reschedule",
    sources=_NOT_STARTED,
    targets=(State.SCHEDULED,),
    when="[`reschedule()`](how-to/change-messages.md#reschedule), or an operator",
    columns=_rescheduled,
)
PUBLISH_NOW = Transition(
    name="publish now",
    sources=_NOT_STARTED,
    targets=(State.READY,),
    when="[`publish_now()`](how-to/change-messages.md#reschedule), or an operator",
    columns=lambda: _rescheduled(timedelta()),
)
RESTORE = Transition(
    name="restore",
    sources=(State.CANCELLED, State.EXPIRED, State.DEAD, State.RETRYING),
    targets=(State.SCHEDULED, State.READY),
    when="[`restore()`](how-to/change-messages.md#restore), or an operator: `scheduled` while its time is in the future",
    state=_SCHEDULED_OR_READY,
    # deliver_at is unchanged: the inbox computes the age of a message from it, which a restore must not reset.
    columns=lambda: {
        "attempts": 0,
        "available_at": _DUE,
        "expires_at": Case(When(IS_AHEAD, then=F("expires_at")), default=same_time_to_expiry(NOW)),
        "settled_at": None,
        "day": LIVE,
        "headers": MarkedAsReplayed(),
    },
)

# Prepared messages: by the code that prepared it, its checker, or an operator.

COMMIT = Transition(
    name="commit",
    sources=UNDECIDED,
    targets=(State.SCHEDULED, State.READY),
    when="its effect has happened: `scheduled` while its time is in the future",
    state=_SCHEDULED_OR_READY,
    columns=lambda: {"attempts": 0, "last_error": "", "available_at": _DUE, "settled_at": None},
)
ROLL_BACK = Transition(
    name="roll back",
    sources=UNDECIDED,
    targets=(State.ROLLED_BACK,),
    when="its effect has not happened and never will",
    columns=lambda: {"last_error": "", "available_at": NOW, "settled_at": NOW, "day": Today()},
)
GIVE_UP = Transition(
    name="give up",
    sources=(State.PREPARED,),
    targets=(State.STUCK,),
    when="its checker has answered “unknown” `CHECK_LIMIT` times",
    columns=lambda error: {"attempts": ONE_MORE_ATTEMPT, "last_error": error, "available_at": NOW},
)
RESUME_CHECKS = Transition(
    name="resume checks",
    sources=(State.STUCK,),
    targets=(State.PREPARED,),
    when="`outbox_resume --checks`, or an operator",
    columns=lambda: {"attempts": 0, "available_at": NOW, "settled_at": None},
)

TRANSITIONS = (
    CONFIRM,
    RETRY,
    PAUSE,
    DIE,
    EXPIRE,
    HOLD,
    FIRE,
    TRY_AGAIN,
    RESUME,
    RELEASE,
    CANCEL,
    RESCHEDULE,
    PUBLISH_NOW,
    RESTORE,
    COMMIT,
    ROLL_BACK,
    GIVE_UP,
    RESUME_CHECKS,
)

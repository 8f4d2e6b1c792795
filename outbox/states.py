"""The states of an outbox message and all transitions between them, each declared once, as data.

`store.transitions` executes them. The API, the relay, the admin, the commands and the table of states in the documentation use
these declarations, so a transition has the same effect in all of them. One parametrised test covers all states and transitions.

A library of state machines changes one loaded instance and saves it: its guard is not part of the UPDATE, and 500 messages are
500 instances. A trigger that rejects every other change would differ between the databases, and a reader of the code would not
see it.

What a transition writes is SQL. A name in braces is a parameter of its execution, such as `{delay}`, which becomes the instant
after that duration, or an expression of the database, such as `{now}`; see `store.transitions`. So one declaration serves
PostgreSQL and SQLite. Expressions of Django's ORM cannot move a row from one partition to another, and compiling their UPDATE
takes about as long as its round trip.
"""

from collections.abc import Mapping

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _

from exactly_once.sql.days import LIVE
from exactly_once.states import Transition


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


class TopicState(TextChoices):
    """How `pause` and `resume` found a topic. A topic that is not active has a row, which has its state."""

    ACTIVE = "active", _("Active")
    """Not paused."""
    PAUSED = "paused", _("Paused")
    """Paused by a person or by code."""
    REFUSED = "refused", _("Refused")
    """Paused by the circuit breaker, because the broker refuses its messages."""
    RESUMING = "resuming", _("Resuming")
    """No longer paused. Its messages are made ready, the oldest first."""
    LIMITED = "limited", _("Limited")
    """Not paused. Its messages are made ready at its rate in `OUTBOX["TOPICS"]`, the oldest first."""


STOPPED = (TopicState.PAUSED, TopicState.REFUSED)
"""States of a topic that is sent again only when it is resumed."""


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


_FAILS: Mapping[str, str] = {
    "attempts": "attempts + 1",
    "last_error": "{error}",
    "error_class": "{error_class}",
    "failing_since": "CASE WHEN error_class = {error_class} AND failing_since IS NOT NULL THEN failing_since ELSE {now} END",
    "failed_at": "{now}",
}
_SETTLES = {"settled_at": "{now}", "day": "{today}"}
_BY_ITS_TIME = {
    "state": "CASE WHEN deliver_at > {now} THEN 'scheduled' ELSE 'ready' END",
    "attempts": "0",
    "available_at": "CASE WHEN deliver_at > {now} THEN deliver_at ELSE {now} END",
    "settled_at": "NULL",
}


# By the relay, for messages that it has claimed.

CONFIRM = Transition(
    name="confirm",
    sources=(State.READY,),
    targets=(State.PUBLISHED,),
    when="the broker confirmed it",
    sets={"attempts": "attempts + 1", "last_error": "''", "error_class": "''", "failing_since": "NULL", **_SETTLES},
    recorded=False,
)
RETRY = Transition(
    name="retry",
    sources=(State.READY,),
    targets=(State.RETRYING,),
    when="nacked or refused, with attempts left; or unroutable; or the broker forbids its topic",
    # Until it expires it blocks its key.
    sets={**_FAILS, "available_at": "CASE WHEN expires_at < {delay} THEN expires_at ELSE {delay} END"},
)
PAUSE = Transition(
    name="pause",
    sources=(State.READY,),
    targets=(State.PAUSED,),
    when="its topic is [paused](how-to/paused-topics.md), or its [rate](how-to/topics.md#a-rate) does not allow it",
    recorded=False,
)
DIE = Transition(
    name="die",
    sources=(State.READY,),
    targets=(State.DEAD,),
    when="nacked or refused, attempts used up; or its row is damaged",
    sets={**_FAILS, "settled_at": "{now}"},
)
EXPIRE = Transition(
    name="expire",
    sources=(State.READY,),
    targets=(State.EXPIRED,),
    when="its `expires_in` ran out",
    sets=_SETTLES,
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
    when="its topic is resumed, it is a probe of its topic, or its rate allows it",
    sets={"available_at": "{now}"},
    recorded=False,
)
RELEASE = Transition(
    name="release",
    sources=(State.WAITING,),
    targets=(State.READY,),
    when="no earlier message of its key is `retrying`, `dead` or `paused` any more",
    sets={"available_at": "{now}"},
    recorded=False,
)

# By the code that published it, or an operator.

CANCEL = Transition(
    name="cancel",
    sources=(State.SCHEDULED, State.READY, State.RETRYING, State.WAITING, State.PAUSED, State.DEAD),
    targets=(State.CANCELLED,),
    when="`cancel()`, or an operator",
    sets=_SETTLES,
)


_RESCHEDULED = {"attempts": "0", "deliver_at": "{due}", "available_at": "{due}", "expires_at": "{expiry_after_due}"}
_NOT_STARTED = (State.SCHEDULED, State.READY, State.RETRYING, State.WAITING, State.PAUSED)
RESCHEDULE = Transition(
    name="reschedule",
    sources=_NOT_STARTED,
    targets=(State.SCHEDULED,),
    when="[`reschedule()`](how-to/change-messages.md#reschedule), or an operator",
    sets=_RESCHEDULED,
)
PUBLISH_NOW = Transition(
    name="publish now",
    sources=_NOT_STARTED,
    targets=(State.READY,),
    when="[`publish_now()`](how-to/change-messages.md#reschedule), or an operator",
    sets={column: written.replace("due}", "now}") for column, written in _RESCHEDULED.items()},
)
RESTORE = Transition(
    name="restore",
    sources=(State.CANCELLED, State.EXPIRED, State.DEAD, State.RETRYING),
    targets=(State.SCHEDULED, State.READY),
    when="[`restore()`](how-to/change-messages.md#restore), or an operator: `scheduled` while its time is in the future",
    # deliver_at is unchanged: the inbox computes the age of a message from it, which a restore must not reset.
    sets={
        **_BY_ITS_TIME,
        "expires_at": "CASE WHEN deliver_at > {now} THEN expires_at ELSE {expiry_after_now} END",
        "day": str(LIVE),
        "headers": "{headers_of_a_replay}",
    },
)

# Prepared messages: by the code that prepared it, its checker, or an operator.

COMMIT = Transition(
    name="commit",
    sources=UNDECIDED,
    targets=(State.SCHEDULED, State.READY),
    when="its effect has happened: `scheduled` while its time is in the future",
    sets={**_BY_ITS_TIME, "last_error": "''"},
)
ROLL_BACK = Transition(
    name="roll back",
    sources=UNDECIDED,
    targets=(State.ROLLED_BACK,),
    when="its effect has not happened and never will",
    sets={"last_error": "''", "available_at": "{now}", **_SETTLES},
)
GIVE_UP = Transition(
    name="give up",
    sources=(State.PREPARED,),
    targets=(State.STUCK,),
    when='its checker has answered “unknown” `CHECKS["LIMIT"]` times',
    sets={"attempts": "attempts + 1", "last_error": "{error}", "available_at": "{now}"},
)
RESUME_CHECKS = Transition(
    name="resume checks",
    sources=(State.STUCK,),
    targets=(State.PREPARED,),
    when="`outbox_resume --checks`, or an operator",
    sets={"attempts": "0", "available_at": "{now}", "settled_at": "NULL"},
)

TRANSITIONS = tuple(each for each in vars().values() if isinstance(each, Transition))
"""All of them, in the order of their declarations."""

"""The states of a message in one handler, all transitions between them, each declared once, and the outcomes of deliveries.

The statements of the store, the decisions of operators and the table of states in the documentation use these declarations, so
a transition writes the same columns in all of them. The guard of each is in the statement that makes it. Failures and attempts
write further columns.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from django.db.models import F, TextChoices
from django.utils.translation import gettext_lazy as _

from exactly_once.sql.days import LIVE, Today
from exactly_once.sql.now import DatabaseTime
from exactly_once.states import Transition


class State(TextChoices):
    """The state of a message in one handler."""

    RECEIVED = "received", _("Received")
    RETRYING = "retrying", _("Retrying")
    WAITING = "waiting", _("Waiting")
    RUNNING = "running", _("Running")
    DONE = "done", _("Done")
    DEAD = "dead", _("Dead")
    SKIPPED = "skipped", _("Skipped")
    SHED = "shed", _("Shed")


DUE = (State.RECEIVED, State.RETRYING, State.RUNNING)
"""States from which a message is run when its next attempt is due; a running one, when its lease has ended."""

SETTLED = (State.DONE, State.SKIPPED, State.SHED)
"""Final states: no attempt and no decision is pending, so these messages may be purged."""

NO_FAILURE = {"last_error": "", "traceback": "", "error_class": "", "error_place": "", "failing_since": None}
"""What the row of a handled message says. Its failed attempts stay."""


_DIES: Mapping[str, Any] = {"settled_at": DatabaseTime(), "next_attempt_at": None}
_SETTLES: Mapping[str, Any] = {**_DIES, "day": Today()}
_NEXT_FENCE = {"fence": F("fence") + 1}

# New messages.

HANDLE = Transition(
    name="handle",
    sources=(),
    targets=(State.DONE,),
    when="a new delivery whose handler succeeded",
    sets=_SETTLES,
    recorded=False,
)
ACCEPT = Transition(
    name="accept",
    sources=(),
    targets=(State.RECEIVED, State.WAITING),
    when=(
        "handed over by `local://`, [redelivered by the broker](receiving.md#redelivered-messages), corrected by an operator, "
        "or not run in time because of a rate limit or busy workers; `waiting` behind another message of its key, if its "
        "handler is [ordered](../how-to/ordered-handlers.md)"
    ),
    recorded=False,
)
REFUSE = Transition(
    name="refuse",
    sources=(),
    targets=(State.DEAD,),
    when="it cannot be read, has no identity, is too old (quarantined), or was rejected",
    sets=_DIES,
)
SHED = Transition(
    name="shed",
    sources=(),
    targets=(State.SHED,),
    when="too many messages wait, and it may be dropped",
    sets=_SETTLES,
)

INSERTED = (HANDLE, ACCEPT, REFUSE, SHED)

# By the processes that run handlers.

PROMOTE = Transition(
    name="promote",
    sources=(State.WAITING,),
    targets=(State.RECEIVED,),
    when="the message before it was handled, skipped or passed over",
    sets=_NEXT_FENCE,
    recorded=False,
)
LEASE = Transition(
    name="lease",
    sources=DUE,
    targets=(State.RUNNING,),
    when="it runs [under a lease](leases.md), which ends at the time of its next attempt; also a new delivery",
    sets={"stopping": False},
    recorded=False,
)
FINISH = Transition(
    name="finish",
    sources=DUE,
    targets=(State.DONE,),
    when="its handler succeeded",
    sets={**NO_FAILURE, **_SETTLES},
    recorded=False,
)
RETRY_LATER = Transition(
    name="retry later",
    sources=DUE,
    targets=(State.RETRYING,),
    when="its handler failed, or raised `RetryLater`; also in a new delivery",
    sets={"settled_at": None},
)
DIE = Transition(
    name="die",
    sources=DUE,
    targets=(State.DEAD,),
    when="attempts used up, or rejected",
    sets=_DIES,
)
ABANDON = Transition(
    name="abandon",
    sources=(State.DONE, State.RECEIVED, State.RETRYING),
    targets=(State.DEAD,),
    when="its handler ended the inbox's transaction by itself",
    sets={
        **_DIES,
        "day": LIVE,
        "error_place": "",
        "failing_since": DatabaseTime(),
        "failed_at": DatabaseTime(),
        "result": None,
    },
)

# By operators.

RETRY = Transition(
    name="retry",
    sources=(State.DEAD, *DUE),
    targets=(State.RETRYING, State.WAITING),
    needs={"quarantined": False},
    when="an operator retried it; `waiting` behind another message of its key; after the end of its lease it stays `running`",
    sets={"attempts": 0, **_NEXT_FENCE, "settled_at": None},
    permission="retry",
)
OVERRIDE = Transition(
    name="override the maximum age",
    sources=(State.DEAD,),
    targets=(State.RETRYING, State.WAITING),
    needs={"quarantined": True},
    when="an operator asserted that a quarantined message has not been handled",
    sets={**RETRY.sets, "quarantined": False},
    permission="override",
)
SKIP = Transition(
    name="skip",
    sources=(*RETRY.sources, State.WAITING),
    targets=(State.SKIPPED,),
    when="an operator skipped it, after the end of its lease, or [replaced](../how-to/correct-payloads.md) a dead one",
    sets=_SETTLES,
    permission="skip",
)

TRANSITIONS = tuple(each for each in vars().values() if isinstance(each, Transition))
"""All of them, in the order of their declarations."""


class Outcome(Enum):
    """The outcome of a delivery. All but DEFERRED and UNSTORED are acknowledged."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"
    STORED = "stored"
    """Its attempt failed, or it takes the careful path; it is stored in the database."""
    DEAD = "dead"
    SHED = "shed"
    """Dropped under load: stored, not handled."""
    DEFERRED = "deferred"
    """Another transaction is handling the same message: not acknowledged, and processed again soon."""
    UNSTORED = "unstored"
    """Neither it nor its failure could be stored: not acknowledged, and processed again later."""

"""What operators can do to messages of the outbox, and how an operation does it in batches."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django import forms
from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.display import exact
from exactly_once.console.operators.actions import (
    Action,
    Canary,
    CanaryResult,
    Given,
    Perform,
    ReasonForm,
    by_name,
    why_not_permitted,
)
from exactly_once.console.operators.failure_groups import FailureGroups
from exactly_once.process.clock import utcnow
from exactly_once.sql.days import LIVE
from exactly_once.states import Transition
from exactly_once.upkeep.operation_rows import OperationTable, RowOutcome
from outbox.api import due
from outbox.conf import outbox_options, span_of
from outbox.errors import InvalidMessage
from outbox.models import OutboxMessage
from outbox.states import (
    CANCEL,
    COMMIT,
    IN_TROUBLE,
    PUBLISH_NOW,
    RESCHEDULE,
    RESTORE,
    RESUME_CHECKS,
    ROLL_BACK,
    UNDECIDED,
    State,
)
from outbox.store import decision_rows, prepared_rows, unique
from outbox.store.decision_rows import WHY, why
from outbox.store.dialect import live
from outbox.store.restoring import OVERDUE, REPLACED
from outbox.store.selecting import placed

operations = OperationTable("outbox")
groups = FailureGroups(OutboxMessage, live, place="topic", who="topic", only=Q(day=LIVE))
"""Failing messages by the broker's kind of answer and topic."""


def _decided(
    transition: Transition,
    alias: str,
    rows: Sequence[int],
    *,
    sources: Collection[str],
    given: Mapping[str, Any],
    by: str,
    reason: str,
) -> Sequence[RowOutcome]:
    names = names_of(alias, rows)
    told, overdue = f"{by}: {reason}" if reason else by, bool(given.get("overdue", True))
    left = decision_rows.decide(alias, transition, rows, sources=sources, reason=told, overdue=overdue).left
    return [RowOutcome(row, names.get(row, f"number {row}"), why(left[row]) if row in left else "") for row in rows]


restore: Perform = partial(_decided, RESTORE)
cancel: Perform = partial(_decided, CANCEL)
publish_now: Perform = partial(_decided, PUBLISH_NOW)


def names_of(alias: str, rows: Sequence[int]) -> dict[int, str]:
    """The names of these messages, for reports."""
    found = placed(alias, rows).values_list("pk", "message_id", "topic", "biz_id")
    return {row: f"{message_id} ({topic} {biz_id})" for row, message_id, topic, biz_id in found}


def _failures_of(alias: str, rows: Sequence[int]) -> dict[int, str]:
    """What these messages failed with."""
    return _failures(placed(alias, rows, unless=State.PUBLISHED))


def _failures(messages: QuerySet[OutboxMessage]) -> dict[int, str]:
    found = messages.values_list("pk", "error_class", "topic")
    return {row: f"{kind} {topic}".strip() for row, kind, topic in found}


def _judge(alias: str, rows: Sequence[int], instant: datetime) -> CanaryResult:
    """What has become of these messages since `instant`, by the database's clock. One in history, or deleted, was published."""
    messages = OutboxMessage.objects.using(alias).filter(pk__in=rows, day=LIVE)
    found = dict(messages.values_list("pk", "state"))
    failed = _failures(messages.filter(state__in=IN_TROUBLE, failed_at__gte=instant))
    over = {State.PUBLISHED, State.SCHEDULED}
    succeeded = [row for row in rows if found.get(row, State.PUBLISHED) in over]
    settled = {*succeeded, *failed}
    return CanaryResult(pending=[row for row in rows if row not in settled], succeeded=succeeded, failed=failed)


# ------------------------------------------------------------------------------------------------------------------ forms


class RestoreForm(ReasonForm):
    overdue = forms.BooleanField(
        required=False,
        initial=True,
        label=_("Include overdue messages"),
        help_text=_("Messages whose time has passed are sent at once. Otherwise they are not changed."),
    )
    field_order = ("overdue", "reason")


class RescheduleForm(ReasonForm):
    """Either a duration from now, or an instant."""

    delay = forms.CharField(
        required=False, label=_("In"), widget=forms.TextInput(attrs={"class": "vTextField", "autofocus": True})
    )
    deliver_at = forms.DateTimeField(
        required=False,
        label=_("Or at"),
        widget=forms.DateTimeInput(attrs={"type": "datetime-local", "step": "1"}, format="%Y-%m-%dT%H:%M:%S"),
    )
    field_order = ("delay", "deliver_at", "reason")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        levels = ", ".join(outbox_options().delays)
        self.fields["delay"].help_text = gettext(
            "From the moment you confirm: a number and s, m, h or d, as in 90s or 30m. Delay levels: %(levels)s."
        ) % {"levels": levels}
        self.fields["deliver_at"].help_text = gettext("In the time zone %(zone)s.") % {
            "zone": timezone.get_current_timezone_name()
        }

    def clean_delay(self) -> timedelta | None:
        text = "".join(self.cleaned_data["delay"].split()).lower()
        if not text:
            return None
        levels = outbox_options().delays
        try:
            delay = levels[text] if text in levels else span_of(text)
        except ValueError as error:
            raise forms.ValidationError(str(error)) from error
        _must_be_near(delay)
        return delay

    def clean_deliver_at(self) -> datetime | None:
        instant: datetime | None = self.cleaned_data["deliver_at"]
        if instant is None:
            return None
        if timezone.is_naive(instant):
            instant = timezone.make_aware(instant)
        if instant <= utcnow():
            raise forms.ValidationError(gettext("It is in the past. To send the messages at once, choose “Publish now…”."))
        _must_be_near(instant)
        return instant

    def clean(self) -> dict[str, Any]:
        given: dict[str, Any] = super().clean() or self.cleaned_data
        if self.errors:
            return given
        times = [given[name] for name in ("delay", "deliver_at") if given.get(name) is not None]
        if len(times) != 1:
            raise forms.ValidationError(gettext("Fill in either “In” or “Or at”, not both."))
        self.done = gettext("rescheduled, due %(when)s") % {"when": _in_words(times[0])}
        return {**given, "due": times[0]}


def _must_be_near(at: timedelta | datetime) -> None:
    """Apply the limit of `publish`, whose error would name the arguments of `publish`."""
    try:
        due(*((at, None) if isinstance(at, timedelta) else (None, at)))
    except InvalidMessage as error:
        raise forms.ValidationError(gettext("This is too far in the future: the maximum is ten years.")) from error


def _in_words(at: timedelta | datetime) -> str:
    if isinstance(at, datetime):
        return gettext("at %(instant)s") % {"instant": exact(at)}
    return gettext("in %(time)s") % {"time": at}


# ---------------------------------------------------------------------------------------------------------------- actions


def is_overdue(row: Any) -> bool:
    """Would a restored message be sent at once?"""
    return row.deliver_at is None or row.deliver_at <= row.database_now


def _decides(transition: Transition) -> Callable[[str, Any, Given], bool]:
    """Make the transition of one message."""

    def decide(alias: str, position: int, given: Given) -> bool:
        due, overdue = given.values.get("due"), given.values.get("overdue", True)
        return bool(decision_rows.decide(alias, transition, [position], reason=given.text, due=due, overdue=overdue))

    return decide


def _ask_again(alias: str, position: Any, given: Given) -> bool:
    """Resume the checks of a stuck message; for one that is not stuck, make the next check due at once."""
    resume = _decides(RESUME_CHECKS)
    return resume(alias, position, given) or prepared_rows.make_check_due(alias, position)


def _why_not_restored(row: Any, given: Given) -> str:
    if unique.is_replaced(row._state.db, row.pk):
        return gettext(WHY[REPLACED])
    left_out = row.state in RESTORE.sources and is_overdue(row) and not given.values["overdue"]
    return gettext(WHY[OVERDUE]) if left_out else ""


RESTORE_THEM = Action(
    name="restore",
    label=_("Restore"),
    done=_("restored"),
    sources=RESTORE.sources,
    run=_decides(RESTORE),
    why_not=_why_not_restored,
    form=RestoreForm,
    question=_("Restore these messages? They get a full set of attempts, and the same time until they expire again."),
    button=_("Restore the messages"),
    perform=restore,
    canary=Canary(failures=_failures_of, judge=_judge),
)
CANCEL_THEM = Action(
    name="cancel",
    label=_("Cancel"),
    done=_("cancelled"),
    sources=CANCEL.sources,
    run=_decides(CANCEL),
    form=ReasonForm,
    question=_(
        "Cancel these messages? No relay will send them any more. The broker may already have a message whose "
        "confirmation is outstanding."
    ),
    button=_("Cancel the messages"),
    perform=cancel,
)
PUBLISH_THEM_NOW = Action(
    name="publish_now",
    label=_("Publish now"),
    done=_("to be published now"),
    permission="reschedule",
    sources=PUBLISH_NOW.sources,
    run=_decides(PUBLISH_NOW),
    form=ReasonForm,
    question=_("Publish these messages now? A sent message cannot be taken back."),
    button=_("Publish the messages now"),
    perform=publish_now,
)
RESCHEDULE_THEM = Action(
    name="reschedule",
    label=_("Reschedule"),
    sources=RESCHEDULE.sources,
    run=_decides(RESCHEDULE),
    form=RescheduleForm,
    question=_(
        "Reschedule these messages? Their attempts start again at zero, and the time between due and expiry stays the same."
    ),
    button=_("Reschedule the messages"),
)
COMMIT_THEM = Action(
    name="commit",
    label=_("Commit, so that it is sent"),
    done=_("committed"),
    permission="decide",
    sources=COMMIT.sources,
    run=_decides(COMMIT),
    form=ReasonForm,
    question=_(
        "Commit these prepared messages? This states that their effect has happened. They are sent, and a sent message "
        "cannot be taken back."
    ),
    button=_("Commit the messages"),
)
ROLL_THEM_BACK = Action(
    name="roll_back",
    label=_("Roll back"),
    done=_("rolled back"),
    permission="decide",
    sources=ROLL_BACK.sources,
    run=_decides(ROLL_BACK),
    form=ReasonForm,
    question=_(
        "Roll back these prepared messages? This states that their effect has not happened and never will. They are never sent."
    ),
    button=_("Roll back the messages"),
)
ASK_AGAIN = Action(
    name="ask_again",
    label=_("Ask the checker again"),
    done=_("to be asked about at once"),
    permission="decide",
    sources=UNDECIDED,
    run=_ask_again,
)
OF_A_MESSAGE = (PUBLISH_THEM_NOW, RESCHEDULE_THEM, CANCEL_THEM, RESTORE_THEM, COMMIT_THEM, ROLL_THEM_BACK, ASK_AGAIN)
ACTIONS = by_name(RESTORE_THEM, CANCEL_THEM, PUBLISH_THEM_NOW)
"""Those that can be operations."""
MANAGE = "manage"
"""The permission of an operation that a client of the HTTP API has planned: its scope for the topic."""


def why_not(operation: Any) -> str:
    """Why the user or client that planned an operation may no longer do so; "" if it may."""
    if not operation.client:
        return why_not_permitted(operation)
    # The settings of a relay may have no tokens.
    clients, topic = outbox_options().http.clients, operation.given["topic"]
    if not clients or any(client.name == operation.client and client.may(topic, MANAGE) for client in clients):
        return ""
    return f"{operation.requested_by} no longer has the scope {MANAGE}:{topic}"

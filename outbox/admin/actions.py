"""What the pages offer to do to messages of the outbox."""

from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.actions import Action, ReasonForm
from exactly_once.console.display import exact
from exactly_once.console.operators.changes import by_name
from exactly_once.process.clock import utcnow
from exactly_once.wire.durations import parse_duration
from outbox.api import due
from outbox.errors import InvalidMessage
from outbox.operators import changes, replaying

_NOT_AHEAD = _("It is not in the future. To send the messages at once, choose “Publish now…”.")


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
        required=False,
        label=_("In"),
        help_text=_("From the moment you confirm: a number and s, m, h or d, as in 90s or 30m."),
        widget=forms.TextInput(attrs={"class": "vTextField", "autofocus": True}),
    )
    deliver_at = forms.DateTimeField(
        required=False,
        label=_("Or at"),
        widget=forms.DateTimeInput(attrs={"type": "datetime-local", "step": "1"}, format="%Y-%m-%dT%H:%M:%S"),
    )
    field_order = ("delay", "deliver_at", "reason")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fields["deliver_at"].help_text = gettext("In the time zone %(zone)s.") % {
            "zone": timezone.get_current_timezone_name()
        }

    def clean_delay(self) -> timedelta | None:
        text = "".join(self.cleaned_data["delay"].split()).lower()
        if not text:
            return None
        try:
            delay = parse_duration("delay", text)
        except ValueError as error:
            raise forms.ValidationError(gettext("Write a number and s, m, h or d, as in 90s or 30m.")) from error
        if not delay:
            raise forms.ValidationError(_NOT_AHEAD)
        _must_be_near(delay)
        return delay

    def clean_deliver_at(self) -> datetime | None:
        instant: datetime | None = self.cleaned_data["deliver_at"]
        if instant is None:
            return None
        if timezone.is_naive(instant):
            instant = timezone.make_aware(instant)
        if instant <= utcnow():
            raise forms.ValidationError(_NOT_AHEAD)
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


RESTORE_THEM = Action(
    **vars(changes.RESTORE_THEM),
    label=_("Restore"),
    done=_("restored"),
    form=RestoreForm,
    question=_("Restore these messages? They get a full set of attempts, and the same time until they expire again."),
    button=_("Restore the messages"),
)
CANCEL_THEM = Action(
    **vars(changes.CANCEL_THEM),
    label=_("Cancel"),
    done=_("cancelled"),
    form=ReasonForm,
    question=_(
        "Cancel these messages? No relay will send them any more. The broker may already have a message whose "
        "confirmation is outstanding."
    ),
    button=_("Cancel the messages"),
)
PUBLISH_THEM_NOW = Action(
    **vars(changes.PUBLISH_THEM_NOW),
    label=_("Publish now"),
    done=_("to be published now"),
    permission="reschedule",
    form=ReasonForm,
    question=_("Publish these messages now? A sent message cannot be taken back."),
    button=_("Publish the messages now"),
)
RESCHEDULE_THEM = Action(
    **vars(changes.RESCHEDULE_THEM),
    label=_("Reschedule"),
    form=RescheduleForm,
    question=_(
        "Reschedule these messages? Their attempts start again at zero, and the time between due and expiry stays the same."
    ),
    button=_("Reschedule the messages"),
)
COMMIT_THEM = Action(
    **vars(changes.COMMIT_THEM),
    label=_("Commit, so that it is sent"),
    done=_("committed"),
    permission="decide",
    form=ReasonForm,
    question=_(
        "Commit these prepared messages? This states that their effect has happened. They are sent, and a sent message "
        "cannot be taken back."
    ),
    button=_("Commit the messages"),
)
ROLL_THEM_BACK = Action(
    **vars(changes.ROLL_THEM_BACK),
    label=_("Roll back"),
    done=_("rolled back"),
    permission="decide",
    form=ReasonForm,
    question=_(
        "Roll back these prepared messages? This states that their effect has not happened and never will. They are never sent."
    ),
    button=_("Roll back the messages"),
)
ASK_AGAIN = Action(
    **vars(changes.ASK_AGAIN),
    label=_("Ask the checker again"),
    done=_("to be asked about at once"),
    permission="decide",
)
REPLAY = Action(**vars(replaying.REPLAY), label=_("Replay"), permission="restore")
OF_A_MESSAGE = (PUBLISH_THEM_NOW, RESCHEDULE_THEM, CANCEL_THEM, RESTORE_THEM, COMMIT_THEM, ROLL_THEM_BACK, ASK_AGAIN)
OPERATIONS = by_name(RESTORE_THEM, CANCEL_THEM, PUBLISH_THEM_NOW, REPLAY)

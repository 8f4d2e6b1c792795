"""The forms of the operator's actions."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.process.clock import utcnow
from outbox.api import due
from outbox.conf import outbox_options, span_of
from outbox.errors import InvalidMessage


class ReasonForm(forms.Form):
    reason = forms.CharField(
        required=False,
        max_length=500,
        widget=forms.TextInput(attrs={"class": "vTextField"}),
        help_text=_("Optional. It is stored in the log and in the trail, with your name."),
    )


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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        levels = ", ".join(outbox_options().delays)
        self.fields["delay"].help_text = gettext(
            "From the moment you confirm: a number and s, m, h or d, as in 90s or 30m. Delay levels: %(levels)s."
        ) % {"levels": levels}
        self.fields["deliver_at"].help_text = gettext("In the time zone %(zone)s.") % {
            "zone": timezone.get_current_timezone_name()
        }

    @property
    def due(self) -> timedelta | datetime:
        at: timedelta | datetime = self.cleaned_data["due"]
        return at

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
        return {**given, "due": times[0]}


def _must_be_near(at: timedelta | datetime) -> None:
    """Apply the limit of `publish`, whose error would name the arguments of `publish`."""
    try:
        due(*((at, None, None) if isinstance(at, timedelta) else (None, None, at)))
    except InvalidMessage as error:
        raise forms.ValidationError(gettext("This is too far in the future: the maximum is ten years.")) from error

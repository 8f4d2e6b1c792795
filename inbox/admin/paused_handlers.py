"""The paused handlers in the admin: since when, by whom, why, and how many stored messages wait."""

from typing import Any

from django import forms
from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.actions import Action
from exactly_once.console.admin.html import identifier, stacked
from exactly_once.console.admin.pages import counted, shown
from exactly_once.console.admin.paused import PausedAdmin, PauseForm
from exactly_once.console.operators.changes import DELETED, each
from exactly_once.upkeep.operation_rows import Given
from exactly_once.wire.text import NAME_LENGTH
from inbox.errors import UnknownHandler
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, PausedHandler
from inbox.operators.handler_pauses import HandlerState, alias_of, pause, resume
from inbox.states import DUE


class PauseHandlerForm(PauseForm):
    handler = forms.CharField(label=_("Handler"), max_length=NAME_LENGTH, help_text=_("Its exact name."))

    def known(self) -> list[str]:
        return sorted(handler.name for handler in registry.all() if handler.using == self.alias)

    def clean_handler(self) -> str:
        name: str = self.cleaned_data["handler"]
        try:
            alias_of(name, self.alias)
        except UnknownHandler as error:
            raise forms.ValidationError(str(error)) from error
        return name


def _pause(alias: str, pk: Any, given: Given) -> bool:
    pause(given.values["handler"], reason=given.reason, by=given.who, using=alias)
    return True


def _resume(alias: str, pk: Any, given: Given) -> bool:
    row = PausedHandler.objects.using(alias).filter(pk=pk).first()
    return row is not None and resume(row.handler, by=given.who, using=alias) is HandlerState.PAUSED


PAUSE = Action(
    name="pause",
    label=_("Pause a handler"),
    done=_("paused"),
    perform=each(PausedHandler, _pause),
    form=PauseHandlerForm,
    question=_("Pause a handler? Its messages wait until it is resumed."),
    button=_("Pause the handler"),
)
RESUME = Action(
    name="resume",
    label=_("Resume"),
    done=_("resumed"),
    perform=each(PausedHandler, _resume, DELETED),
    question=_("Resume these handlers? Their messages are run, the oldest first."),
    button=_("Resume the handlers"),
)


@admin.register(PausedHandler)
class PausedHandlerAdmin(PausedAdmin):
    """By handler. To add one is to pause it."""

    kind = "handler"
    noun = _("handler")
    nouns = _("handlers")
    nothing = _("No handler is paused.")
    hint = _(
        "No process runs messages of these handlers. New messages stay in the broker's queue; stored ones stay due. Nothing is "
        "lost, and messages keep their order. Only an operator resumes a handler."
    )
    named_by = "handler"
    adds = PAUSE
    actions = (RESUME,)

    ordering = ("handler",)
    list_display = ("handler_name", "stored_count", "since", "by_whom", "why")
    fields = ("handler_name", "state_badge", "stored", "since_exactly", "by_whom", "reason_text")

    handler_name = shown(_("handler"), "handler", identifier)

    @admin.display(description=_("stored messages"))
    def stored(self, row: Any) -> str:
        return counted(InboxMessage.objects.using(self.using).filter(handler=row.handler, state__in=DUE))

    @admin.display(description=_("state"))
    def stored_count(self, row: Any) -> SafeString:
        """In the list: the badge, and how many stored messages wait."""
        return stacked(self.badge_of(row), format_html(gettext("{} stored messages"), self.stored(row)))

"""The paused handlers in the admin: since when, by whom, why, and how many stored messages wait."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.acting import counted
from exactly_once.admin.paused import PausedAdmin
from exactly_once.display import identifier, labelled, stacked
from exactly_once.operators.actions import Action, Given
from inbox.errors import UnknownHandler
from inbox.handlers.registry import registry
from inbox.models import DUE, InboxMessage, PausedHandler
from inbox.operators.pausing import alias_of, pause_handler, resume_handler


class PauseForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = PausedHandler
        fields = ("handler", "reason")
        widgets: ClassVar[Any] = {"reason": forms.TextInput(attrs={"class": "vTextField"})}
        help_texts: ClassVar[Any] = {
            "handler": _("Its exact name."),
            "reason": _("Optional. It is shown with the handler, and logged."),
        }

    using: ClassVar[str]

    def clean_handler(self) -> str:
        name: str = self.cleaned_data["handler"]
        try:
            alias_of(name, self.using)
        except UnknownHandler as error:
            raise forms.ValidationError(str(error)) from error
        return name

    def validate_unique(self) -> None:
        """A paused handler may be paused again, with another reason."""


def _resume(alias: str, pk: Any, given: Given) -> bool:
    row = PausedHandler.objects.using(alias).filter(pk=pk).first()
    return row is not None and resume_handler(row.handler, by=given.who, using=alias)


RESUME = Action(
    name="resume",
    label=_("Resume"),
    done=_("resumed"),
    run=_resume,
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
    form = PauseForm
    actions = (RESUME,)

    ordering = ("handler",)
    list_display = ("handler_name", "stored_count", "since", "by_whom", "why")
    shown = ("handler_name", "state_badge", "stored", "since_exactly", "by_whom", "reason_text")

    def known(self) -> list[str]:
        return sorted(handler.name for handler in registry.all() if handler.using == self.using)

    def pause(self, row: Any, by: str) -> None:
        pause_handler(row.handler, reason=row.reason, by=by, using=self.using)

    @admin.display(description=_("handler"))
    def handler_name(self, row: Any) -> SafeString:
        return identifier(row.handler)

    @admin.display(description=_("stored messages"))
    def stored(self, row: Any) -> str:
        return counted(InboxMessage.objects.using(self.using).filter(handler=row.handler, state__in=DUE))

    @admin.display(description=_("state"))
    def stored_count(self, row: Any) -> SafeString:
        """In the list: the badge, and how many stored messages wait."""
        return stacked(self.badge_of(row), format_html(gettext("{} stored messages"), self.stored(row)))

    @admin.display(description=_("by"))
    def by_whom(self, row: Any) -> SafeString:
        return labelled(_("by"), identifier(row.paused_by))

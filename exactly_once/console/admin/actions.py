"""What the pages offer to do to rows: a change with its words, its permission and the form that asks for what it needs.

The pages take their buttons, lists of actions, confirmations, permission checks and audit entries from the declarations
(`admin.acting`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from django import forms
from django.db import DEFAULT_DB_ALIAS
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from exactly_once.console.operators.changes import Change, Perform, permission
from exactly_once.upkeep.operation_rows import Given

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise as Text


_REASON = _("Reason")


def reason_field(help_text: Text, *, label: Text = _REASON, required: bool = True) -> forms.CharField:
    """The operator's reason, in the form of an action."""
    widget = forms.TextInput(attrs={"class": "vTextField", "autofocus": required})
    return forms.CharField(label=label, required=required, max_length=500, widget=widget, help_text=help_text)


class ActionForm(forms.Form):
    """What an action asks for. An attribute that is not empty replaces that of the action.

    Attributes:
        rows: the selected ones.
        alias: of their database.
        danger: a warning above the rows.
        preview: what the action would do, below the rows.
    """

    danger: ClassVar[Text] = ""
    question: Text = ""
    button: Text = ""
    done: Text = ""
    preview: Any = ""

    def __init__(self, data: Any = None, *, rows: Sequence[Any] = (), alias: str = DEFAULT_DB_ALIAS, **options: Any) -> None:
        self.rows, self.alias = rows, alias
        super().__init__(data, **options)


class ReasonForm(ActionForm):
    reason = reason_field(_("Optional. It is stored in the log and in the trail, with your name."), required=False)


class NeededReasonForm(ActionForm):
    reason = reason_field(_("The reason is stored in the admin log."))


@dataclass(frozen=True, kw_only=True)
class Action(Change):
    """A change as an action of Django's admin.

    Attributes:
        label: of its button, without the dots of an action that asks.
        done: the past participle, for reports: "restored".
        permission: the verb of the permission, without the model; "" if it is the name.
        may: may this user do it to this row, or (None) to some row? It replaces the permission.
        question: on the page that asks; "" if the action does not ask.
        button: of that page; default: the label.
        form: what it asks for.
        is_single: acts on one row only.
        respond: makes the response in place of `perform`, from the page, the request, the selected rows (as a queryset, if the
            action does not ask) and what was given.
    """

    label: Text
    done: Text = ""
    permission: str = ""
    may: Callable[[Any, Any], bool] | None = None
    question: Text = ""
    button: Text = ""
    form: type[ActionForm] | None = None
    is_single: bool = False
    respond: Callable[[Any, Any, Any, Given], Any] | None = None
    perform: Perform = lambda alias, rows, given: ()

    def codename(self, model: Any) -> str:
        """The permission that it requires for the rows of this model."""
        return permission(model, self.permission or self.name)

    # An action of Django's admin is a function with these attributes.

    do_not_call_in_templates: ClassVar[bool] = True

    def __call__(self, model_admin: Any, request: Any, queryset: Any) -> Any:
        return model_admin.take(self, request, queryset)

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def short_description(self) -> Text:
        return format_lazy("{}…", self.label) if self.question else self.label

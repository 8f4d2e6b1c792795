"""What an operator can do to rows, declared once as data.

    CANCEL = Action(name="cancel", label=_("Cancel"), done=_("cancelled"), sources=(READY, DEAD), run=cancel, ...)

The pages take their buttons, lists of actions, confirmations, permission checks and audit entries from the declarations
(`admin.acting`). An action with `perform` can also be planned as an operation on many rows, which a running process executes
(`operations`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from django import forms
from django.contrib.auth import get_user_model
from django.db import DEFAULT_DB_ALIAS
from django.db.models import Q, QuerySet
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from exactly_once.upkeep.operation_rows import RowOutcome

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
class Given:
    """What an operator has said with an action.

    Attributes:
        user: their name.
        values: of the further fields of the form.
    """

    user: str
    reason: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def who(self) -> str:
        return f"{self.user} in the admin"

    @property
    def by(self) -> str:
        return f"by {self.who}"

    @property
    def text(self) -> str:
        """Who and why, for the trail."""
        return f"{self.by}: {self.reason}" if self.reason else self.by


class Perform(Protocol):
    """Change some rows inside the open transaction; returns the outcome of each. A row without one is in the next batch."""

    def __call__(
        self, alias: str, rows: Sequence[int], *, sources: Collection[str], given: Mapping[str, Any], by: str, reason: str
    ) -> Sequence[RowOutcome]: ...


@dataclass(frozen=True, kw_only=True)
class CanaryResult:
    """What has become of the messages of a wave.

    Attributes:
        pending: they have not been run yet.
        succeeded: they have succeeded, or no longer exist.
        failed: by row, why they failed since the wave began.
    """

    pending: Sequence[int] = ()
    succeeded: Sequence[int] = ()
    failed: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Canary:
    """How a canary sees whether messages fail, as before or in another way.

    Attributes:
        failures: why these rows fail now, by row.
        judge: what has become of these rows since an instant.
    """

    failures: Callable[[str, Sequence[int]], Mapping[int, str]]
    judge: Callable[[str, Sequence[int], datetime], CanaryResult]


@dataclass(frozen=True, kw_only=True)
class Action:
    """An action on rows.

    Attributes:
        label: of its button, without the dots of an action that asks.
        done: the past participle, for reports: "restored".
        permission: the verb of the permission, without the model; "" if it is the name.
        may: may this user do it to this row, or (None) to some row? It replaces the permission.
        run: the transition of one row, with the database alias and the primary key. It is guarded: False if the state of the
            row does not allow it.
        sources: the states from which it is allowed; () for all.
        offered: what must hold besides.
        why_not: why it did not change a row; "" if that is due to the state.
        question: on the page that asks; "" if the action does not ask.
        button: of that page.
        form: what it asks for.
        is_single: acts on one row only.
        respond: makes the response in place of `run`, from the page, the request, the selected rows (as a queryset, if the
            action does not ask) and what was given.
        perform: makes the action an operation.
        condition: of the rows of an operation, besides `sources`.
        canary: None if the operation cannot be a canary.
    """

    name: str
    label: Text
    done: Text = ""
    permission: str = ""
    may: Callable[[Any, Any], bool] | None = None
    run: Callable[[str, Any, Given], bool] | None = None
    sources: Sequence[str] = ()
    offered: Callable[[Any], bool] = lambda row: True
    why_not: Callable[[Any, Given], str] = lambda row, given: ""
    question: Text = ""
    button: Text = ""
    form: type[ActionForm] | None = None
    is_single: bool = False
    respond: Callable[[Any, Any, Any, Given], Any] | None = None
    perform: Perform | None = None
    condition: Q = field(default_factory=Q)
    canary: Canary | None = None

    def codename(self, model: Any) -> str:
        """The permission that it requires for the rows of this model."""
        return permission(model, self.permission or self.name)

    def is_offered(self, row: Any) -> bool:
        """Is it allowed in the present state of the row?"""
        return (not self.sources or row.state in self.sources) and self.offered(row)

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


def permission(model: Any, verb: str) -> str:
    """The name of a permission on the rows of a model, also for a proxy of it."""
    options = model._meta.concrete_model._meta
    return f"{options.app_label}.{verb}_{options.model_name}"


def by_name(*actions: Action) -> dict[str, Action]:
    return {action.name: action for action in actions}


def why_not_permitted(operation: Any) -> str:
    """Why the user who planned an operation may no longer do so; "" if they may, or if it needs no permission."""
    if not operation.permission:
        return ""
    model: Any = get_user_model()
    user: Any = QuerySet(model).filter(**{model.USERNAME_FIELD: operation.requested_by}).first()
    if user is not None and user.is_active and user.is_staff and user.has_perm(operation.permission):
        return ""
    return f"{operation.requested_by} is no longer an active member of staff with {operation.permission}"

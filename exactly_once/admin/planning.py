"""The page that previews a bulk operation, and plans it once the operator has confirmed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db import transaction
from django.db.models import Count, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from exactly_once.operators.audit import Subject, actor_of, record
from exactly_once.operators.operation_rows import OperationTable, Plan
from exactly_once.operators.operations import BulkAction

MOST_ROWS = 1_000_000
_PLAN = "exactly_once/plan.html"
_CONFIRMED = "plan_confirmed"


class PlanForm(forms.Form):
    """What every operation asks for. A subclass adds the parameters of its action."""

    reason = forms.CharField(
        label=_("Reason"),
        required=False,
        max_length=500,
        widget=forms.TextInput(attrs={"class": "vTextField"}),
        help_text=_("It is kept with the operation, and in the trail of each message."),
    )
    rate = forms.IntegerField(
        label=_("Messages per second"),
        required=False,
        min_value=1,
        max_value=100_000,
        help_text=_("At most. Empty: as fast as the database allows."),
    )
    canary = forms.BooleanField(
        label=_("As a canary"),
        required=False,
        help_text=_(
            "1 message first, then 10, then 100 and so on. Each wave is awaited. The operation stops by itself when a message "
            "fails again as before."
        ),
    )

    def __init__(self, action: BulkAction, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if action.canary is None:
            del self.fields["canary"]
        self.fields["reason"].required = action.needs_reason

    @property
    def given(self) -> dict[str, Any]:
        """The parameters of the action."""
        return {name: value for name, value in self.cleaned_data.items() if name not in PlanForm.base_fields}


class Planner:
    """Plans operations on the messages of one app.

    Args:
        table: its operations.
        actions: by name.
        forms: by name, for actions with parameters of their own.
    """

    def __init__(
        self, table: OperationTable, actions: Mapping[str, BulkAction], forms: Mapping[str, type[PlanForm]] | None = None
    ) -> None:
        self._table = table
        self.actions = actions
        self._forms = forms or {}

    def respond(
        self,
        model_admin: admin.ModelAdmin[Any],
        request: HttpRequest,
        chosen: QuerySet[Any],
        action: BulkAction,
        selection: str,
        back_url: str,
    ) -> HttpResponse:
        """The preview, or after its confirmation the page of the planned operation.

        Args:
            chosen: messages, on the database to work on.
            selection: what was selected, for people.
            back_url: where to go without an operation.
        """
        counts = _counts(chosen, action)
        applies = sum(count for _, count, is_changed in counts if is_changed)
        form = self._forms.get(action.name, PlanForm)(action, request.POST if _CONFIRMED in request.POST else None)
        if form.is_valid() and applies:
            return self._plan(model_admin, request, chosen, action, selection, form)
        labels = dict(chosen.model._meta.get_field("state").flatchoices)
        context = {
            **model_admin.admin_site.each_context(request),
            "title": _("%(action)s: preview") % {"action": action.label},
            "opts": model_admin.opts,
            "media": model_admin.media,
            "action": action,
            "form": form,
            "selection": selection,
            "counts": [(labels.get(state, state), count, is_changed) for state, count, is_changed in counts],
            "applies": applies,
            "total": sum(count for _, count, _ in counts),
            "is_cut": sum(count for _, count, _ in counts) > MOST_ROWS,
            "most": MOST_ROWS,
            "back_url": back_url,
            "posted": request.POST.get("action", ""),
            "select_across": request.POST.get("select_across", ""),
            "confirmed_name": _CONFIRMED,
            "checkbox_name": ACTION_CHECKBOX_NAME,
            "checked": request.POST.getlist(ACTION_CHECKBOX_NAME)[:1],
        }
        request.current_app = model_admin.admin_site.name
        return TemplateResponse(request, _PLAN, context)

    def _plan(
        self,
        model_admin: admin.ModelAdmin[Any],
        request: HttpRequest,
        chosen: QuerySet[Any],
        action: BulkAction,
        selection: str,
        form: PlanForm,
    ) -> HttpResponse:
        user: Any = request.user
        given = form.cleaned_data
        applicable = chosen.filter(action.condition, state__in=action.sources)
        plan = Plan(
            action=action.name,
            selection=selection,
            sources=sorted(str(state) for state, _, is_changed in _counts(chosen, action) if is_changed),
            requested_by=user.get_username(),
            permission=f"{chosen.model._meta.app_label}.{action.permission}",
            reason=given["reason"],
            given=form.given,
            rate=given["rate"],
            is_canary=given.get("canary", False),
        )
        rows = applicable.order_by("pk").values_list("pk", flat=True)[:MOST_ROWS]
        with transaction.atomic(using=chosen.db):
            operation = self._table.plan(chosen.db, plan, rows.iterator(chunk_size=10_000))
            subject = Subject(kind="operation", id=str(operation.pk), name=selection)
            record(
                self._table.app, chosen.db, actor_of(request), action.name, [subject], {**given, "messages": operation.total}
            )
        messages.success(request, _("The operation is planned. A running process executes it."))
        return HttpResponseRedirect(
            reverse(f"{model_admin.admin_site.name}:exactly_once_operation_change", args=[operation.pk])
        )


def _counts(chosen: QuerySet[Any], action: BulkAction) -> Sequence[tuple[str, int, bool]]:
    """By state: its number of messages, and does the action change them?"""
    counts: list[tuple[str, int, bool]] = []
    bounded: QuerySet[Any] = QuerySet(chosen.model, using=chosen.db).filter(
        pk__in=chosen.order_by().values("pk")[: MOST_ROWS + 1]
    )
    by_state = dict(bounded.order_by().values_list("state").annotate(Count("pk")).order_by("state"))
    changed = dict(
        bounded.filter(action.condition, state__in=action.sources).order_by().values_list("state").annotate(Count("pk"))
    )
    for state, count in by_state.items():
        if state in changed:
            counts.append((state, changed[state], True))
        if left := count - changed.get(state, 0):
            counts.append((state, left, False))
    return counts

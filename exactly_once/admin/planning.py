"""The page that previews a bulk operation, and plans it once the operator has confirmed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from exactly_once.display import number
from exactly_once.operators.actions import Action, ReasonForm
from exactly_once.operators.audit import Subject, actor_of, record
from exactly_once.operators.operation_rows import OperationTable, Plan
from exactly_once.sql.connections import decision_transaction
from exactly_once.sql.labels import package_of

if TYPE_CHECKING:
    from exactly_once.admin.acting import ReadOnlyAdmin

MOST_ROWS = 1_000_000
_PLAN = "exactly_once/plan.html"
_CONFIRMED = "plan_confirmed"


class _Limits(forms.Form):
    """What every operation asks for, besides what its action asks for."""

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
            "fails."
        ),
    )


def _form(action: Action, data: Any) -> Any:
    form: Any = type("PlanForm", (_Limits, action.form or ReasonForm), {})(data)
    if action.canary is None:
        del form.fields["canary"]
    return form


def plan(
    model_admin: ReadOnlyAdmin,
    request: HttpRequest,
    chosen: QuerySet[Any],
    action: Action,
    selection: str,
    back_url: str,
) -> HttpResponse:
    """The preview of an operation, or after its confirmation the page of the planned operation.

    Args:
        chosen: messages, on the database to work on.
        selection: what was selected, for people.
        back_url: where to go without an operation.
    """
    counts = _counts(chosen, action)
    applies, total = sum(count for _, count, is_changed in counts if is_changed), sum(count for _, count, _ in counts)
    form = _form(action, request.POST if _CONFIRMED in request.POST else None)
    if form.is_valid() and applies:
        operation = _planned(request, chosen, action, selection, form, [state for state, _, changed in counts if changed])
        messages.success(request, _("The operation is planned. A running process executes it."))
        return HttpResponseRedirect(
            reverse(f"{model_admin.admin_site.name}:exactly_once_operation_change", args=[operation.pk])
        )
    labels = dict(chosen.model._meta.get_field("state").flatchoices)
    context = {
        "title": _("%(action)s: preview") % {"action": action.label},
        "action": action,
        "form": form,
        "selection": selection,
        "counts": [(labels.get(state, state), number(count), is_changed) for state, count, is_changed in counts],
        "applies": number(applies),
        "total": number(total),
        "is_empty": not applies,
        "is_cut": total > MOST_ROWS,
        "most": number(MOST_ROWS),
        "back_url": back_url,
        "posted": request.POST.get("action", ""),
        "select_across": request.POST.get("select_across", ""),
        "confirmed_name": _CONFIRMED,
        "checkbox_name": ACTION_CHECKBOX_NAME,
        "checked": request.POST.getlist(ACTION_CHECKBOX_NAME)[:1],
    }
    return model_admin.respond(request, _PLAN, context)


def _planned(
    request: HttpRequest, chosen: QuerySet[Any], action: Action, selection: str, form: Any, sources: Sequence[str]
) -> Any:
    user: Any = request.user
    given, app, alias = form.cleaned_data, package_of(chosen.model), chosen.db
    planned = Plan(
        action=action.name,
        selection=selection,
        sources=sorted(map(str, sources)),
        requested_by=user.get_username(),
        permission=action.codename(chosen.model),
        reason=given["reason"],
        given={name: value for name, value in given.items() if name not in {"reason", *_Limits.base_fields}},
        rate=given["rate"],
        is_canary=given.get("canary", False),
    )
    applicable = chosen.filter(action.condition, state__in=action.sources)
    rows = applicable.order_by("pk").values_list("pk", flat=True)[:MOST_ROWS]
    with decision_transaction(alias):
        operation = OperationTable(app).plan(alias, planned, rows.iterator(chunk_size=10_000))
        subject = Subject(kind="operation", id=str(operation.pk), name=selection)
        record(app, alias, actor_of(request), action.name, [subject], {**given, "messages": operation.total})
    return operation


def _counts(chosen: QuerySet[Any], action: Action) -> Sequence[tuple[str, int, bool]]:
    """By state: its number of messages, and does the action change them?"""
    bounded: QuerySet[Any] = QuerySet(chosen.model, using=chosen.db).filter(
        pk__in=chosen.order_by().values("pk")[: MOST_ROWS + 1]
    )
    changed = Count("pk", filter=Q(action.condition, state__in=action.sources))
    by_state = bounded.order_by("state").values_list("state").annotate(Count("pk"), changed=changed)
    parts = ((state, ((count, True), (total - count, False))) for state, total, count in by_state)
    return [(state, count, is_changed) for state, counts in parts for count, is_changed in counts if count]

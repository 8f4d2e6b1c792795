"""The page that previews a bulk operation, and plans it once the operator has confirmed it."""

from collections.abc import Mapping, Sequence
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import Count, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.actions import Action, ReasonForm
from exactly_once.console.admin.pages import ReadOnlyAdmin, page_url
from exactly_once.console.display import number
from exactly_once.console.operators.audit import Subject, actor_of, record
from exactly_once.models import Operation
from exactly_once.packages import package_of
from exactly_once.sql.connections import decision_transaction
from exactly_once.upkeep.operation_rows import OperationTable

MOST_ROWS = 1_000_000
_CONFIRMED = "plan_confirmed"
_LONGEST_NUMBER = 18


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
    model_admin: ReadOnlyAdmin, request: HttpRequest, chosen: QuerySet[Any], action: Action, selection: str, back_url: str
) -> HttpResponse:
    """The preview of an operation, or after its confirmation the page of the planned operation.

    Args:
        chosen: messages, on the database to work on.
        selection: what was selected, for people.
        back_url: where to go without an operation.
    """
    alias, table = chosen.db, OperationTable(package_of(chosen.model))
    given = request.POST.get(_CONFIRMED, "")
    pk = int(given) if given.isdecimal() and len(given) <= _LONGEST_NUMBER else 0
    form = _form(action, request.POST if pk else None)
    user, permission = actor_of(request).name, action.codename(chosen.model)
    planned = Operation(action=action.name, selection=selection, requested_by=user, permission=permission)
    if form.is_valid():
        if operation := _confirmed(request, table, alias, pk, planned, form.cleaned_data):
            messages.success(request, _("The operation is planned. A running process executes it."))
            url = page_url(model_admin.admin_site, "exactly_once_operation_change", [operation.pk])
            return HttpResponseRedirect(url or back_url)
        words = _("Nothing was planned: the preview is out of date, or was confirmed before. This is a new one.")
        messages.warning(request, words)
    rows = chosen.filter(action.condition, state__in=action.sources).order_by("pk").values_list("pk", "state")[:MOST_ROWS]
    operation, changed = table.preview(alias, planned, rows.iterator(chunk_size=10_000), instead_of=pk)
    counts = _counts(chosen, changed)
    applies, total = operation.total, sum(count for _, count, _ in counts)
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
        "previewed": operation.pk,
        "is_cut": total > MOST_ROWS,
        "most": number(MOST_ROWS),
        "back_url": back_url,
        "posted": request.POST.get("action", ""),
        "select_across": request.POST.get("select_across", ""),
        "confirmed_name": _CONFIRMED,
        "checkbox_name": ACTION_CHECKBOX_NAME,
        "checked": request.POST.getlist(ACTION_CHECKBOX_NAME)[:1],
    }
    return model_admin.respond(request, "exactly_once/plan.html", context)


def _confirmed(
    request: HttpRequest, table: OperationTable, alias: str, pk: int, previewed: Operation, given: Mapping[str, Any]
) -> Any | None:
    """The operation that was previewed, which is planned now. None: see `OperationTable.confirm`."""
    values = {name: value for name, value in given.items() if name not in {"reason", *_Limits.base_fields}}
    answers = {"reason": given["reason"], "rate": given["rate"], "is_canary": given.get("canary", False)}
    with decision_transaction(alias):
        operation = table.confirm(alias, pk, previewed, given=values, **answers)
        if operation is not None:
            subject = Subject(kind="operation", id=str(operation.pk), name=operation.selection)
            parameters = {**given, "messages": operation.total}
            record(table.app, alias, actor_of(request), previewed.action, [subject], parameters)
    return operation


def _counts(chosen: QuerySet[Any], changed: Mapping[str, int]) -> Sequence[tuple[str, int, bool]]:
    """By state: its number of messages, and does the action change them?

    Args:
        changed: the messages of the preview by state.
    """
    keys = chosen.order_by().values("pk")[: MOST_ROWS + 1]
    bounded: QuerySet[Any] = QuerySet(chosen.model, using=chosen.db).filter(pk__in=keys)
    by_state = dict(bounded.order_by("state").values_list("state").annotate(Count("pk")))
    parts = (
        (state, ((changed.get(state, 0), True), (by_state.get(state, 0) - changed.get(state, 0), False)))
        for state in sorted({*by_state, *changed})
    )
    return [(state, count, is_changed) for state, counts in parts for count, is_changed in counts if count > 0]

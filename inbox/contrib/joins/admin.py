"""The runs of joins in the admin: what they wait for, since when and until when, and the operators' decisions."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.db.models import Prefetch, Q, QuerySet
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.actions import Action, NeededReasonForm
from exactly_once.console.admin.filters import ConditionFilter
from exactly_once.console.admin.html import (
    NOTHING,
    Tone,
    age,
    as_html,
    badge,
    flow_link,
    folded,
    headline,
    identifier,
    labelled,
    moment,
    stacked,
)
from exactly_once.console.admin.pages import computed, message_link, shown
from exactly_once.console.display import visible
from exactly_once.console.operators.changes import Perform, each, state_now
from exactly_once.console.operators.redaction import Redaction
from exactly_once.upkeep.operation_rows import Given
from inbox.conf import inbox_options
from inbox.contrib.joins.models import Part, Run
from inbox.contrib.joins.runs import NotDecidable, complete, extend, missing, start
from inbox.states import DUE, SETTLED, State

_TONES = {State.DONE: Tone.DONE, State.DEAD: Tone.STOPPED, State.SKIPPED: Tone.OVER}
_OPEN = [state for state in State if state not in SETTLED]


class CompleteForm(NeededReasonForm):
    payloads = forms.CharField(
        label=_("Payloads"),
        strip=False,
        widget=forms.Textarea(attrs={"class": "message-edit", "rows": 12, "spellcheck": "false", "autofocus": True}),
        help_text=_('A JSON object with the payload of each missing topic: {"stock.exported": {"run_id": "2026-01-31"}}.'),
    )
    field_order = ("payloads", "reason")

    def clean_payloads(self) -> dict[str, Any]:
        try:
            payloads = json.loads(self.cleaned_data["payloads"])
        except ValueError as error:
            raise forms.ValidationError(gettext("It is not JSON: %(error)s") % {"error": error}) from error
        if not isinstance(payloads, dict) or not payloads:
            raise forms.ValidationError(gettext("It must be a JSON object with at least one topic."))
        return payloads


class ExtendForm(NeededReasonForm):
    minutes = forms.IntegerField(label=_("Minutes from now"), min_value=1, max_value=365 * 24 * 60, initial=60)
    field_order = ("minutes", "reason")


class OpenFilter(ConditionFilter):
    """Open runs, unless others are chosen."""

    title = _("state")
    parameter_name = "state"
    default = (_("Open"), Q(row__state__in=_OPEN))
    fixed: ClassVar[Any] = {"dead": (_("Past the deadline, or failed"), Q(row__state=State.DEAD)), "all": (_("All"), Q())}


def _is_decidable(row: Any) -> bool:
    return row.row.state in {State.RECEIVED, State.RETRYING, State.DEAD}


def _lacks_messages(row: Any) -> bool:
    return _is_decidable(row) and bool(missing(row))


def _each(change: Callable[[str, Any, Given], object]) -> Perform:
    return each(Run, change, lambda run: state_now(run.row))


COMPLETE = Action(
    name="complete",
    label=_("Enter the missing messages"),
    done=_("completed"),
    perform=_each(lambda alias, pk, given: complete(alias, pk, payloads=given.values["payloads"], by=given.text)),
    offered=_lacks_messages,
    question=_("Enter the missing messages of these runs? A run starts when none is missing."),
    button=_("Enter the messages"),
    form=CompleteForm,
)
EXTEND = Action(
    name="extend",
    label=_("Wait longer"),
    done=_("waiting until the new deadline"),
    perform=_each(lambda alias, pk, given: extend(alias, pk, timedelta(minutes=given.values["minutes"]), by=given.text)),
    offered=_is_decidable,
    question=_("Extend the deadline of these runs?"),
    button=_("Extend the deadline"),
    form=ExtendForm,
)
START = Action(
    name="start",
    label=_("Start without the missing messages"),
    done=_("started"),
    perform=_each(lambda alias, pk, given: start(alias, pk, by=given.text)),
    offered=_lacks_messages,
    question=_("Start these runs without the missing messages? Messages that come later have no effect."),
    button=_("Start the runs"),
    form=NeededReasonForm,
)


@admin.register(Run)
class RunAdmin(ActingAdmin):
    """The open runs first: what each waits for."""

    kind = "run"
    noun = _("run")
    nouns = _("runs")
    nothing = _("No run is open.")
    hint = _(
        "A run is open from its first message until its join has handled it. It starts when all messages have come. At the "
        "deadline it becomes a dead letter, or starts without the missing messages, as its join says."
    )
    large_columns = tuple(f"row__{name}" for name in ("body", "headers", "traceback", "failures", "result", "conflicting_body"))
    refusals = (NotDecidable,)
    actions = (COMPLETE, EXTEND, START)
    ordering = ("deadline_at",)
    list_filter = (OpenFilter,)
    search_fields = ("run_id",)
    search_help_text = _("A run id or a join, exact.")
    list_display = ("state_badge", "name", "waits_for", "since", "deadline")
    list_display_links = ("name",)
    fields = (
        "state_badge",
        "join_name",
        "run_id_name",
        "waits_for",
        "error",
        "message_link",
        "since",
        "deadline",
        "started",
        "come",
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        parts = Prefetch("parts", Part.objects.using(self.using).defer("body", "headers").order_by("pk"))
        return super().get_queryset(request).select_related("row").prefetch_related(parts)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        row = super().get_object(request, object_id, from_field)
        if row is not None:
            row.shows_payloads = self.half.is_visible(request.user)
        return row

    def called(self, term: str) -> Q:
        return Q(run_id=term) | Q(handler=term)

    def audited_id(self, row: Any) -> str:
        return str(row.row.message_id)

    def subject(self, row: Any) -> str:
        return visible(f"{row.run_id} ({row.handler})")

    def badge_of(self, row: Any) -> SafeString:
        if row.row.state in DUE and missing(row) and not row.started_by:
            return badge(gettext("Waiting"), Tone.LATER)
        return badge(row.row.get_state_display(), _TONES.get(row.row.state, Tone.OPEN))

    name = computed(_("join, run id"), lambda row: stacked(identifier(row.handler), identifier(row.run_id)))
    join_name = shown(_("join"), "handler", identifier)
    run_id_name = computed(_("run id"), lambda row: flow_link(row, row.run_id))

    @admin.display(description=_("waits for"))
    def waits_for(self, row: Any) -> SafeString:
        topics = missing(row)
        return labelled(_("waits for"), stacked(*map(identifier, topics)) if topics else NOTHING)

    since = computed(_("since"), lambda row: labelled(_("since"), age(row.opened_at, row.database_now)))
    deadline = computed(_("deadline"), lambda row: labelled(_("deadline"), moment(row.deadline_at, row.database_now)))
    error = shown(_("last error, or reason"), "row.last_error", headline)

    started = shown(_("started without the missing messages"), "started_by", identifier)

    @admin.display(description=_("its row in the inbox"))
    def message_link(self, row: Any) -> SafeString:
        return message_link(self.admin_site, self.package, row.row_id, row.row.message_id)

    @admin.display(description=_("messages that have come"))
    def come(self, row: Any) -> SafeString:
        parts = [(part, self._shown(part) if part.body and row.shows_payloads else "") for part in row.parts.all()]
        content = {"parts": parts, "flow": row.flow_url, "now": row.database_now}
        return render_to_string("exactly_once/parts.html", content)

    def _shown(self, part: Part) -> SafeString:
        redaction = Redaction(inbox_options().redact)
        shown = redaction.shown(bytes(part.body), "application/json", topic=part.topic, headers=part.headers)
        return folded(gettext("Show the payload"), as_html(shown))

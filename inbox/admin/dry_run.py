"""The action “dry run”, and the page that shows its result."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.actions import Action, ActionForm
from exactly_once.console.admin.html import Tone, badge
from exactly_once.console.admin.messages import MessageAdmin
from exactly_once.console.admin.trail import attempts
from exactly_once.console.display import visible
from exactly_once.upkeep.operation_rows import Given
from inbox.operators.dry_run import LONGEST, NotRunDry, dry_run, why_not

_OUTCOMES = {
    "handled": (_("It would be handled"), Tone.DONE),
    "deferred": (_("It would be deferred"), Tone.LATER),
    "rejected": (_("It would become a dead letter"), Tone.STOPPED),
    "failed": (_("It would fail"), Tone.FAILING),
    "timed out": (_("It did not end in time"), Tone.STOPPED),
}
_STORED = {
    "attempt": "attempts",
    "error": "error",
    "traceback": "traceback",
    "class": "error_class",
    "place": "error_place",
    "own": "own_frames",
}
"""The attributes of a failure by their names in a stored message."""


class DryRunForm(ActionForm):
    danger = _(
        "The handler runs in this web process, and its transaction is rolled back. Mail, HTTP requests and other effects "
        "outside the database are real."
    )
    seconds = forms.IntegerField(
        label=_("Time limit in seconds"),
        min_value=1,
        max_value=int(LONGEST.total_seconds()),
        initial=5,
        help_text=_("The handler is interrupted after this time."),
    )


def _respond(model_admin: MessageAdmin, request: HttpRequest, rows: Sequence[Any], given: Given) -> HttpResponse:
    """What the handler would write and publish; nothing is stored."""
    (row,) = rows
    try:
        result = dry_run(model_admin.using, row.pk, timedelta(seconds=given.values["seconds"]))
    except NotRunDry as refused:
        words = _("Message %(message)s: not run: %(why)s") % {"message": model_admin.subject(row), "why": refused}
        model_admin.message_user(request, visible(words), messages.ERROR)
        return HttpResponseRedirect(model_admin.own_url(row.pk))
    model_admin.log_change(request, row, f"Dry run: {result.outcome}.")
    model_admin.audit(request, model_admin.using, DRY_RUN.name, row)
    redaction = model_admin.redaction()
    failure = result.failure and {name: getattr(result.failure, column) for name, column in _STORED.items()}
    context = {
        "result": result,
        "outcome": badge(*_OUTCOMES[result.outcome]),
        "failure": attempts([failure]) if failure else "",
        # The parameters of statements are values of the payload.
        "writes": [write.sql if redaction else str(write) for write in result.writes],
        "published": [
            (f"{one.topic} {one.biz_id}", redaction.shown(one.body, one.content_type, topic=one.topic, headers=one.headers))
            for one in result.published
        ],
        "read_only": ", ".join(sorted(set(result.read_only))),
        "title": _("Dry run"),
        "subject": model_admin.subject(row),
        "message_url": model_admin.own_url(row.pk),
        "changelist_url": model_admin.changelist_url,
    }
    return model_admin.respond(request, "exactly_once/dry_run.html", context)


DRY_RUN = Action(
    name="dry_run",
    label=_("Dry run"),
    offered=lambda row: not why_not(row),
    question=_("Run the handler without its effect?"),
    button=_("Run it dry"),
    form=DryRunForm,
    is_single=True,
    respond=_respond,
)

"""What operators can do to messages of the inbox, and how an operation does it in batches."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from django import forms
from django.db.models import Q
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.display import difference_as_html
from exactly_once.console.operators.actions import Action, ActionForm, Canary, CanaryResult, Given, by_name, reason_field
from exactly_once.console.operators.failure_groups import FailureGroups
from exactly_once.failures import without_line
from exactly_once.sql.days import LIVE
from exactly_once.sql.finding import lately
from exactly_once.upkeep.operation_rows import OperationTable, RowOutcome
from inbox import states
from inbox.errors import NotEditable
from inbox.models import InboxMessage
from inbox.operators import decisions
from inbox.operators.editing import conflict_token, correct, editable, replace_message, run_conflicting
from inbox.states import SETTLED, State
from inbox.store.dialect import TABLE

operations = OperationTable("inbox")
groups = FailureGroups(InboxMessage, lambda connection: TABLE, place="error_place", who="handler")
"""The failed messages by exception class and place in the code."""
_LARGEST_EDITED = 256 * 1024
"""In characters. A larger form may exceed Django's DATA_UPLOAD_MAX_MEMORY_SIZE after encoding."""


def retry(
    alias: str, rows: Sequence[int], *, sources: Collection[str], given: Mapping[str, Any], by: str, reason: str
) -> Sequence[RowOutcome]:
    """Make messages due now, with a full set of attempts."""
    recorded = f"{by}: {reason}" if reason else by
    return decisions.decide_many(alias, rows, decisions.retrying(recorded, sources=sources))


def skip(
    alias: str, rows: Sequence[int], *, sources: Collection[str], given: Mapping[str, Any], by: str, reason: str
) -> Sequence[RowOutcome]:
    """Skip messages: their effect will not happen."""
    return decisions.decide_many(alias, rows, decisions.skipping(reason, by=by, sources=sources))


def _failures(alias: str, rows: Sequence[int]) -> dict[int, str]:
    """What these rows failed with, without the line in the code, which an unrelated change moves."""
    found = InboxMessage.objects.using(alias).filter(pk__in=rows, day=LIVE)
    return {
        row: f"{kind} {without_line(place)}".strip()
        for row, kind, place in found.values_list("pk", "error_class", "error_place")
    }


def _judge(alias: str, rows: Sequence[int], instant: datetime) -> CanaryResult:
    """What has become of these rows since `instant`, by the database's clock. One in history, or deleted, has succeeded."""
    messages = InboxMessage.objects.using(alias).filter(pk__in=rows, day=LIVE)
    states = dict(messages.values_list("pk", "state"))
    failed = messages.filter(failed_at__gte=instant, state__in=[State.RETRYING, State.DEAD]).values_list("pk", flat=True)
    failures = _failures(alias, list(failed))
    succeeded = [row for row in rows if states.get(row, State.DONE) in SETTLED]
    decided = {*succeeded, *failures}
    return CanaryResult(pending=[row for row in rows if row not in decided], succeeded=succeeded, failed=failures)


# ------------------------------------------------------------------------------------------------------------------ forms


class SkipForm(ActionForm):
    reason = reason_field(_("Why the effect must not happen. The reason is stored with the message and in the admin log."))


class OverrideForm(ActionForm):
    danger = _(
        "These messages are in quarantine, because the inbox no longer knows whether they were handled before. If one was, its "
        "effect would happen a second time. First check the data that it would write, the logs of the day it was published, "
        "and the publisher's records. Skip the messages that were handled."
    )
    reason = reason_field(
        _("What shows that none of them was handled before. The reason is stored in the admin log."), label=_("Evidence")
    )


class ConflictForm(ActionForm):
    danger = _(
        "The handler runs with the content of the latest message that has the biz-id of an earlier one. Its effect happens in "
        "addition to that of the earlier one. First check that the two are different facts. Earlier contents are not stored."
    )
    reason = reason_field(
        _("What shows that it is another fact. The reason is stored in the trail and in the admin log."), label=_("Evidence")
    )
    shown = forms.CharField(required=False, widget=forms.HiddenInput)

    def __init__(self, data: Any = None, *, rows: Sequence[Any] = (), **options: Any) -> None:
        shown = "" if data else " ".join(conflict_token(row) for row in rows)
        super().__init__(data, rows=rows, initial={"shown": shown}, **options)


class EditForm(ActionForm):
    """Edits the payload of a message. The edit is confirmed if its changes were shown and the payload is the same since.

    Raises:
        NotEditable: the message cannot be corrected, or not on this page, for this reason.
    """

    payload = forms.CharField(
        label=_("Payload"),
        strip=False,
        widget=forms.Textarea(
            attrs={"class": "message-edit", "rows": 24, "spellcheck": "false", "autocapitalize": "off", "autofocus": True}
        ),
        help_text=_("JSON. The content type and the headers stay unchanged."),
    )
    shown = forms.CharField(required=False, widget=forms.HiddenInput)

    def __init__(self, data: Any = None, *, rows: Sequence[Any] = (), **options: Any) -> None:
        messages = InboxMessage.objects.using(rows[0]._state.db)
        self._stored = messages.get(pk=rows[0].pk, day__in={rows[0].day, *lately()})
        text = editable(self._stored)
        if len(text) > _LARGEST_EDITED:
            raise NotEditable(
                f"Its payload has {len(text):,} characters; the limit of this page is {_LARGEST_EDITED:,}. Use the command "
                "inbox_edit."
            )
        super().__init__(data, rows=rows, initial={"payload": text}, **options)
        self._is_agreed = False

    def is_valid(self) -> bool:
        return super().is_valid() and self._is_agreed

    def clean(self) -> dict[str, Any]:
        given: dict[str, Any] = super().clean() or {}
        if "payload" not in given:
            return given
        try:
            self.preview = difference_as_html(correct(self._stored, given["payload"]).changes)
        except NotEditable as error:
            self.add_error("payload", str(error))
            return given
        digest = hashlib.sha256(given["payload"].encode("utf-8", "surrogatepass")).hexdigest()
        self.question, self.button = _("Replace this message with the corrected one?"), _("Replace the message and run it")
        self._is_agreed = given.get("shown") == digest
        self.data = {**dict(self.data.items()), "shown": digest}
        return given


# ---------------------------------------------------------------------------------------------------------------- actions


def _is_not_leased(row: Any) -> bool:
    return row.state != State.RUNNING or row.next_attempt_at is None or row.next_attempt_at <= row.database_now


def _is_known(row: Any) -> bool:
    """It is not in quarantine."""
    return _is_not_leased(row) and not (row.state == State.DEAD and row.quarantined)


def _why_not_retried(row: Any, given: Given) -> str:
    if row.state == State.DEAD and row.quarantined:
        return gettext("it is in quarantine; use “Retry past the maximum message age…”")
    return ""


def _why_not_overridden(row: Any, given: Given) -> str:
    return gettext("it is not in quarantine; use “Retry now”") if row.state == State.DEAD and not row.quarantined else ""


RETRY = Action(
    name="retry",
    label=_("Retry now"),
    done=_("due for a retry now"),
    sources=states.RETRY.sources,
    run=lambda alias, pk, given: decisions.retry(alias, pk, reason=given.text),
    offered=_is_known,
    why_not=_why_not_retried,
    perform=retry,
    condition=Q(quarantined=False),
    canary=Canary(failures=_failures, judge=_judge),
)
EDIT = Action(
    name="edit",
    label=_("Edit and retry"),
    done=_("replaced by a corrected message"),
    sources=(State.DEAD,),
    run=lambda alias, pk, given: replace_message(alias, pk, given.values["payload"], by=given.by) is not None,
    offered=_is_known,
    question=_("Edit the payload of this message"),
    button=_("Show the changes"),
    form=EditForm,
    is_single=True,
)
SKIP = Action(
    name="skip",
    label=_("Skip"),
    done=_("skipped"),
    sources=states.SKIP.sources,
    run=lambda alias, pk, given: decisions.skip(alias, pk, given.reason, by=given.by),
    offered=_is_not_leased,
    question=_("Skip these messages? Their effect will not happen."),
    button=_("Skip the messages"),
    form=SkipForm,
    perform=skip,
)
OVERRIDE = Action(
    name="override_maximum_age",
    label=_("Retry past the maximum message age"),
    done=_("due now, past the maximum message age"),
    permission=states.OVERRIDE.permission,
    sources=(State.DEAD,),
    run=lambda alias, pk, given: decisions.override_maximum_age(alias, pk, reason=given.text),
    offered=lambda row: bool(row.quarantined),
    why_not=_why_not_overridden,
    question=_("Run these messages although they may have been handled before?"),
    button=_("Run the messages"),
    form=OverrideForm,
)
RUN_CONFLICTING = Action(
    name="run_conflicting",
    label=_("Run the different content as its own message"),
    done=_("different content due now, as its own message"),
    run=lambda alias, pk, given: run_conflicting(alias, pk, confirmed=given.values["shown"].split(), by=given.text),
    offered=lambda row: row.conflicting_attributes is not None,
    why_not=lambda row, given: gettext("no other content is stored with it, or it was run"),
    question=_("Run the different content of these messages as messages of their own?"),
    button=_("Run as own messages"),
    form=ConflictForm,
)
ACTIONS = by_name(RETRY, SKIP)
"""Those that can be operations."""

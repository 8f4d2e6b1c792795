"""The results of tasks in the admin. Tasks that have not ended are messages: a link leads to topics and handlers of queues."""

import json
from dataclasses import fields, replace
from typing import Any, ClassVar

from django.contrib import admin
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.actions import Action, NeededReasonForm, ReasonForm
from exactly_once.console.admin.filters import ConditionFilter
from exactly_once.console.admin.html import (
    Tone,
    age,
    as_html,
    badge,
    flow_link,
    folded,
    headline,
    identifier,
    labelled,
    stacked,
    text,
)
from exactly_once.console.admin.pages import computed, instant, shown
from exactly_once.console.admin.sections import listed
from exactly_once.console.display import number, visible
from exactly_once.console.operators.changes import DELETED, each
from exactly_once.console.operators.redaction import Redaction
from exactly_once.models import TopicsAndHandlers
from exactly_once.sql.deletions import delete_matching
from exactly_once.upkeep.operation_rows import RowOutcome
from inbox.conf import inbox_options
from inbox.contrib.tasks.compat import InvalidTask
from inbox.contrib.tasks.models import Result, Status
from inbox.contrib.tasks.queues import PREFIX, topic_of
from inbox.contrib.tasks.results import of_row
from inbox.models import InboxMessage
from inbox.operators.decisions import decide, retrying

_TONES = {Status.SUCCESSFUL: Tone.DONE, Status.FAILED: Tone.STOPPED}


def retry(alias: str, pk: int, *, by: str) -> str:
    """Retry the dead message of a failed task, under its id, and delete the result: it has not ended. Or why it was not."""
    row = Result.objects.using(alias).filter(pk=pk).first()
    if row is None:
        return str(DELETED)
    topic = topic_of(row.queue, lease=row.leased)
    dead = InboxMessage.objects.using(alias).filter(message_id=row.message_id, handler=topic, state="dead").first()
    if dead is None:
        return gettext("its message is not a dead letter")
    unchanged = decide(alias, dead.pk, retrying(by)).unchanged
    if not unchanged:
        failed = Result.objects.using(alias).filter(message_id=row.message_id, status=Status.FAILED)
        delete_matching(failed)  # not the success that a process whose lease had ended writes now
    return unchanged


def enqueue_again(alias: str, pk: int) -> bool:
    """Enqueue a task with the same arguments, now and without its biz-id, so that it runs whatever became of the first.

    Raises:
        InvalidTask: Django's class, or that of the package: it cannot be imported, or is not valid any more.
        ImproperlyConfigured: its backend was removed.
    """
    row = Result.objects.using(alias).filter(pk=pk).first()
    if row is None:
        return False
    result = of_row(row)
    own = {"key": row.key, "biz_id": None, "unique": False, "lease": row.leased}
    known = own.keys() & {field.name for field in fields(result.task)}
    task = replace(result.task, run_after=None, **{name: own[name] for name in known})
    task.enqueue(*result.args, **result.kwargs)
    return True


RETRY = Action(
    name="retry",
    label=_("Retry"),
    done=_("retried"),
    perform=lambda alias, rows, given: [RowOutcome(pk, unchanged=retry(alias, pk, by=given.text)) for pk in rows],
    offered=lambda row: row.status == Status.FAILED,
    question=_("Retry these tasks?"),
    button=_("Retry the tasks"),
    form=ReasonForm,
)
ENQUEUE = Action(
    name="enqueue",
    label=_("Enqueue again"),
    done=_("enqueued again"),
    perform=each(Result, lambda alias, pk, given: enqueue_again(alias, pk)),
    question=_("Enqueue these tasks again, with the same arguments? Their effects happen once more."),
    button=_("Enqueue the tasks"),
    form=NeededReasonForm,
)


class StatusFilter(ConditionFilter):
    title = _("state")
    parameter_name = "status"
    fixed: ClassVar[Any] = {status: (label, Q(status=status)) for status, label in Status.choices}


@admin.register(Result)
class ResultAdmin(ActingAdmin):
    """The latest first."""

    kind = "task"
    noun = _("task")
    nouns = _("tasks")
    nothing = _("No task has ended yet.")
    hint = _(
        "Tasks that have ended. Those that wait, run or are retried are messages of the inbox or the outbox, where they can be "
        "retried, skipped and cancelled."
    )
    large_columns = ("body", "return_value")
    refusals = (InvalidTask, ImproperlyConfigured)
    actions = (RETRY, ENQUEUE)
    ordering = ("-finished_at",)
    list_filter = (StatusFilter,)
    search_fields = ("message_id",)
    search_help_text = _("A message id, a function or a queue, exact.")
    list_display = ("state_badge", "task_and_queue", "attempts", "ended", "last_error")
    list_display_links = ("task_and_queue",)
    fields = (
        *("state_badge", "function", "queue_name", "message_name", "attempts", "workers", "enqueued", "started", "finished"),
        *("last_error", "given", "returned", "tracebacks"),
    )

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        url = listed(TopicsAndHandlers, prefix=PREFIX).url(self.admin_site, request)
        links = [(_("Queues, and what waits or fails"), url)] if url else []
        return super().changelist_view(request, {"page_links": links, **(extra_context or {})})

    def called(self, term: str) -> Q:
        return Q(message_id=term) | Q(task=term) | Q(queue=term)

    def audited_id(self, row: Any) -> str:
        return str(row.message_id)

    def subject(self, row: Any) -> str:
        return visible(f"{row.task} ({row.message_id})")

    def badge_of(self, row: Any) -> SafeString:
        return badge(row.get_status_display(), _TONES[row.status])

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        row = super().get_object(request, object_id, from_field)
        if row is not None:
            row.shows_payloads = self.half.is_visible(request.user)
        return row

    task_and_queue = computed(_("function, queue"), lambda row: stacked(identifier(row.task), identifier(row.queue)))
    function = shown(_("function"), "task", identifier)
    queue_name = shown(_("queue"), "queue", identifier)
    message_name = computed(_("message id"), lambda row: flow_link(row, row.message_id))
    attempts = computed(_("attempts"), lambda row: labelled(_("attempts"), number(len(row.worker_ids))))
    ended = computed(_("ended"), lambda row: labelled(_("ended"), age(row.finished_at, row.database_now)))
    enqueued, started = instant(_("enqueued"), "enqueued_at"), instant(_("first attempt"), "started_at")
    finished = instant(_("ended"), "finished_at")
    workers = shown(_("attempts by"), "worker_ids", lambda names: stacked(*map(identifier, names)))
    last_error = computed(_("last error"), lambda row: headline(_raised(row.errors[-1]) if row.errors else ""))
    given = computed(_("arguments"), lambda row: _hidden(row, gettext("Show the arguments"), bytes(row.body)))
    returned = computed(_("return value"), lambda row: _returned(row) if row.status == Status.SUCCESSFUL else "")
    tracebacks = computed(_("failed attempts"), lambda row: _tracebacks(row.errors))


def _raised(error: Any) -> str:
    """The line of a traceback that names the exception. Its message may have others."""
    path = str(error["exception_class_path"]).removeprefix("builtins.")
    lines = [line.strip(" |+-") for line in str(error["traceback"]).strip().splitlines()] or [path]
    return next((line for line in reversed(lines) if line.startswith(path)), lines[-1])


def _tracebacks(errors: Any) -> SafeString:
    """That of each failed attempt, the latest first, which is unfolded."""
    latest = (text(error["traceback"]) for error in errors[-1:])
    earlier = (folded(headline(_raised(error)), text(error["traceback"])) for error in errors[-2::-1])
    return format_html_join("", "{}", ((part,) for part in (*latest, *earlier)))


def _returned(row: Any) -> SafeString:
    return _hidden(row, gettext("Show the return value"), json.dumps(row.return_value).encode())


def _hidden(row: Any, summary: str, content: bytes) -> SafeString:
    """Content of a message, redacted, for those who may see messages."""
    if not row.shows_payloads:
        return SafeString("")
    redaction = Redaction(inbox_options().redact)
    topic = topic_of(row.queue, lease=row.leased)
    return folded(summary, as_html(redaction.shown(content, "application/json", topic=topic, headers={})))

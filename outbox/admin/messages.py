"""The list and the pages of the outbox's messages."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin import filters
from exactly_once.console.admin.actions import Action
from exactly_once.console.admin.failure_groups import FailureFilter, failure_text
from exactly_once.console.admin.html import NOTHING, age, as_html, folded, headline, identifier, note, stacked, text, warning
from exactly_once.console.admin.messages import EXPORT, MessageAdmin
from exactly_once.console.admin.pages import computed, counted, instant
from exactly_once.console.admin.sections import count_text
from exactly_once.console.display import as_json, ngettext, number
from exactly_once.console.operators.redaction import Redaction
from exactly_once.sql.days import FIRST_DAY, LIVE
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.envelope import JSON
from exactly_once.wire.formats import CELERY_TOPICS
from exactly_once.wire.identity import uuid_in
from outbox.admin.actions import OF_A_MESSAGE, RESTORE_THEM
from outbox.callbacks import checkers
from outbox.conf import outbox_options
from outbox.models import SECONDARY, STREAM, OutboxMessage
from outbox.operators import figures
from outbox.states import IN_TROUBLE, SETTLED, UNDECIDED, State
from outbox.store import selecting, unique

_DUE = (State.PREPARED, State.SCHEDULED, State.READY, State.WAITING, State.RETRYING)
_READY = STREAM | SECONDARY
_OPEN = Q(state=State.PREPARED) | Q(state=State.SCHEDULED) | _READY | Q(state=State.WAITING)
"""Those that may be overdue without having failed. Each alternative has a partial index."""
_WHY = {
    State.READY: _("A relay sends it in its next pass."),
    State.SCHEDULED: _("It is sent when it is due."),
    State.PAUSED: _("Its topic is paused. It is sent when the topic is resumed."),
    State.RETRYING: _("It could not be sent. A relay tries again when it is due."),
    State.DEAD: _("It could not be sent, and no relay tries again unless an operator restores it."),
    State.PUBLISHED: _("It is confirmed: the broker, or with local:// the inbox, has stored it."),
    State.EXPIRED: _("It expired before it was sent."),
    State.CANCELLED: _("It was cancelled and is not sent."),
    State.ROLLED_BACK: _("Its effect has not happened, so it is not sent."),
}
"""Why a message is in its state, if nothing else is known."""
_CALLBACKS = 20


class OutboxStuckFilter(filters.StuckFilter):
    words = _("Dead, retrying, stuck or overdue")
    failing = (State.DEAD, State.RETRYING, State.STUCK)

    def overdue(self, before: DatabaseTime) -> Q:
        return Q(_OPEN, day=LIVE, available_at__lt=before)


class OutboxStateFilter(filters.StateFilter):
    """With the counts of the overview, which have a limit.

    Where there is none of a state, the condition of its day spares reading others in the order of the list.
    """

    def conditions(self, model_admin: Any) -> filters.Conditions:
        days = {state: Q(day__gte=FIRST_DAY) if state in SETTLED else Q(day=LIVE) for state in State}
        states = {state: Q(state=state) for state in State} | {State.READY: _READY}
        return {state: (state.label, states[state] & days[state]) for state in State}

    def counts(self, request: HttpRequest, model_admin: Any) -> Mapping[str, str]:
        return {state: count_text(count) for state, count in figures.counts(model_admin.using).items()}


class DueFilter(filters.ConditionFilter):
    """Of scheduled messages, by the time until they are due."""

    title = _("due")
    parameter_name = "due"
    _spans: ClassVar[Any] = {
        "minute": (_("Within a minute"), timedelta(minutes=1)),
        "hour": (_("Within an hour"), timedelta(hours=1)),
        "day": (_("Within a day"), timedelta(days=1)),
        "week": (_("Within a week"), timedelta(days=7)),
    }
    fixed: ClassVar[Any] = {
        value: (label, Q(state=State.SCHEDULED, day=LIVE, available_at__lt=DatabaseTime(span)))
        for value, (label, span) in _spans.items()
    }


@admin.register(OutboxMessage)
class OutboxMessageAdmin(MessageAdmin):
    """The list of all messages, and the page of each message."""

    large_columns = (*MessageAdmin.large_columns, "wire")
    actions: Any = (*OF_A_MESSAGE, EXPORT)

    list_display: Any = ("state_badge", "summary", "age", "error_headline")
    list_display_links = ("summary",)
    list_filter: ClassVar[Any] = (
        OutboxStuckFilter,
        OutboxStateFilter,
        DueFilter,
        filters.ErrorClassFilter,
        FailureFilter,
        filters.TopicFilter,
        filters.AgeFilter,
        filters.AttemptsFilter,
        filters.HostFilter,
    )
    age_column = "message_id"
    born_column = "created_at"
    unsettled = Q(day=LIVE)
    # They grow with time, and history has no index by position.
    ordering: ClassVar[Any] = ("-message_id",)
    fieldsets = (
        (None, {"fields": ("state_explained", "error_text", "failing")}),
        (_("Content"), {"fields": ("payload", "headers_text", "form_text")}),
        (_("Message"), {"fields": ("topic_name", "biz_id_name", "message_id_name", "key_name", "attempts")}),
        (_("Callbacks"), {"fields": ("callbacks",)}),
        (_("Times"), {"fields": ("created", "deliver", "due_exactly", "expires", "settled")}),
        (_("Routing"), {"fields": ("priority", "shard", "uniqueness")}),
        (_("Origin"), {"fields": ("correlation_id_name", "causation_id_name", "traceparent_name")}),
    )
    nothing = _("No messages yet. Every message that publish() stores is listed here, the newest first.")

    def get_ordering(self, request: HttpRequest) -> Any:
        """Scheduled and prepared messages: the next one first, which is the order of an index."""
        by_time = request.GET.get("due") or request.GET.get("state") in (State.SCHEDULED, *UNDECIDED)
        return ("available_at", "id") if by_time else self.ordering

    def remark(self, action: Action, row: Any) -> SafeString | str:
        words = super().remark(action, row)
        if words:
            return words
        if action is RESTORE_THEM:
            if row.is_unique and unique.is_replaced(self.using, row.pk):
                return gettext("A later message has replaced it: it is not changed.")
            if row.deliver_at is None or row.deliver_at <= row.database_now:
                return gettext("Overdue: it is sent at once.")
            return age(row.deliver_at, row.database_now, gettext("Scheduled again, due "))
        return age(row.available_at, row.database_now, gettext("Due ")) if row.state == State.SCHEDULED else ""

    def topics(self) -> Sequence[str]:
        return selecting.topics(self.using, filters.MOST_OFFERED)

    def redaction(self) -> Redaction:
        return Redaction(outbox_options().REDACT)

    def warnings(self, request: HttpRequest) -> Sequence[SafeString]:
        stuck = OutboxMessage.objects.using(self.using).filter(state=State.STUCK)
        if not stuck.exists():
            return ()
        words = gettext(
            'Stuck prepared messages: {}. <a href="?state=stuck">An operator must decide</a>, because no checker knows '
            "whether their effect has happened."
        )
        return (warning(format_html(words, counted(stuck))),)

    def called(self, term: str) -> Q:
        """The name of a Celery task also finds its messages. The index of biz-ids begins with the topic."""
        named = Q(topic__in=[term, f"{CELERY_TOPICS}{term}"]) | Q(topic__in=selecting.topics(self.using), biz_id=term)
        return named | Q(message_id=name) if (name := uuid_in(term)) else named

    def explanation(self, row: Any) -> SafeString:
        if row.state in UNDECIDED:
            return _undecided(row)
        if row.state == State.WAITING:
            return self._behind(row)
        if row.state in IN_TROUBLE and row.key:
            held = self._of_its_key(row).filter(pk__gt=row.pk, state=State.WAITING)
            words = gettext("It blocks the later messages of its ordering key. Waiting behind it: %(count)s.") % {
                "count": counted(held)
            }
            return note(words)
        return note(_WHY.get(row.state, ""))

    def _behind(self, row: Any) -> SafeString:
        stopping = (*IN_TROUBLE, State.PAUSED)
        head = self._of_its_key(row).filter(pk__lt=row.pk, state__in=stopping).order_by("pk").first()
        if head is None:
            return note(gettext("Nothing blocks it any more: a relay makes it ready in its next pass."))
        words = gettext(
            'It waits behind an earlier message of its ordering key, which {}: <a href="{}">{}</a> ({}). '
            "It is sent automatically after that one is published or cancelled."
        )
        why = gettext("is paused") if head.state == State.PAUSED else gettext("failed")
        return note(format_html(words, why, *self.link_to(head)))

    def _of_its_key(self, row: Any) -> QuerySet[Any]:
        return OutboxMessage.objects.using(self.using).exclude(key="").filter(key=row.key).defer(*self.large_columns)

    summary = computed(_("topic, biz-id"), lambda row: stacked(identifier(row.topic), identifier(row.biz_id)))

    @admin.display(description=_("age, attempts"), ordering="message_id")
    def age(self, row: Any) -> SafeString:
        created = format_html("{} {}", age(row.created_at, row.database_now), self.attempts_line(row))
        if row.state not in _DUE:
            return stacked(created)
        prefix = gettext("check due ") if row.state == State.PREPARED else gettext("due ")
        return stacked(created, age(row.available_at, row.database_now, prefix))

    @admin.display(description=_("payload"))
    def payload(self, row: Any) -> SafeString:
        form = _form_of(row)
        content_type = form.get("content_type") if isinstance(form, dict) else None
        # SQLite stores a body that was written by hand as text.
        body = row.body.encode() if isinstance(row.body, str) else bytes(row.body)
        shown = self.redaction().shown(body, str(content_type or JSON), topic=row.topic, headers=row.headers)
        return folded(gettext("Show the payload"), as_html(shown))

    @admin.display(description=_("wire format"))
    def form_text(self, row: Any) -> SafeString:
        """For a message in the format of another protocol: its exchange, routing key, properties and headers."""
        form = _form_of(row)
        if isinstance(form, str):
            refused = gettext("It is not JSON, so it cannot be redacted. It is not shown.")
            return note(refused) if self.redaction() else text(form)
        return NOTHING if form is None else as_html(as_json(self.redaction().headers(form)))

    @admin.display(description=_("to be called"))
    def callbacks(self, row: Any) -> SafeString:
        """The pending callbacks of the message."""
        pending = row.pendingcallback_set.using(self.using).order_by("available_at", "pk")[:_CALLBACKS]
        lines, words = [], gettext("{} ({}), {} so far, {}{}")
        for one in pending:
            calls = ngettext("%(count)s call", "%(count)s calls", one.attempts)
            due = age(one.available_at, row.database_now, gettext("due "))
            error = format_html(": {}", headline(one.last_error)) if one.last_error else ""
            lines.append(format_html(words, identifier(one.callback), one.event, calls, due, error))
        return stacked(*lines)

    @admin.display(description=_("failure group"))
    def failing(self, row: Any) -> SafeString:
        """The broker's answer and the topic; a link to the other messages that fail so."""
        return failure_text(self, row, row.error_class, row.topic)

    uniqueness = computed(_("unique by topic and biz-id"), lambda row: gettext("yes") if row.is_unique else NOTHING)
    deliver = instant(_("deliver at"), "deliver_at")
    due_exactly = instant(_("due"), "available_at")
    expires = instant(_("expires"), "expires_at")


def _undecided(row: Any) -> SafeString:
    """A note on a prepared message: its checks, and who must decide."""
    unknown = gettext("It has answered “unknown” %(answers)s of %(limit)s times.") % {
        "answers": number(row.attempts),
        "limit": number(outbox_options().CHECKS.LIMIT),
    }
    if row.state == State.STUCK:
        words = gettext("Its checker does not know whether its effect has happened. %(unknown)s Find out, then decide.")
        return warning(words % {"unknown": unknown})
    if checkers.of(row.topic) is None:
        words = gettext("This process has no checker for its topic. Without a checker, an operator must decide about it.")
        return warning(words)
    words = gettext("It is not known yet whether its effect has happened. Its checker is asked {}. {}")
    return note(format_html(words, age(row.available_at, row.database_now, gettext("next: ")), unknown))


def _form_of(row: Any) -> Any:
    """The stored form of the other protocol, as JSON, or as text if it is not JSON; None without one."""
    if row.wire is None:
        return None
    try:
        return json.loads(row.wire)
    except (ValueError, RecursionError):
        return row.wire

"""Admin pages of inbox messages: their state, why a message was not handled, and the operators' actions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import BigIntegerField, Q, QuerySet
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin import filters
from exactly_once.console.admin.actions import Action
from exactly_once.console.admin.failure_groups import FailureFilter, failure_text
from exactly_once.console.admin.html import (
    NOTHING,
    Tone,
    age,
    as_html,
    badge,
    folded,
    headline,
    identifier,
    note,
    stacked,
    text,
    warning,
)
from exactly_once.console.admin.messages import EXPORT, MessageAdmin
from exactly_once.console.admin.pages import counted, instant, shown
from exactly_once.console.admin.sections import named
from exactly_once.console.admin.trail import attempts
from exactly_once.console.display import as_json, duration, number, visible
from exactly_once.console.operators.changes import permission
from exactly_once.console.operators.redaction import Redaction
from exactly_once.failures import DEFERRED
from exactly_once.sql.days import LIVE
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.partitions import newest
from exactly_once.wire.envelope import compression_of
from exactly_once.wire.formats import WEBHOOK_HANDLERS
from exactly_once.wire.identity import uuid_in
from inbox import states
from inbox.admin.actions import EDIT, OVERRIDE, RETRY, RUN_CONFLICTING, SKIP
from inbox.admin.dry_run import DRY_RUN
from inbox.conf import inbox_options
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, PausedHandler, Receipt
from inbox.operators import accounting
from inbox.operators.decisions import REFUSALS
from inbox.operators.processes import hanging, unattended, what_to_start, where_run
from inbox.states import DUE, State
from inbox.store import receipts

_HEADS = (State.RECEIVED, State.RETRYING, State.RUNNING, State.DEAD)
"""States of a message that holds back the later ones of its key."""
_STEPS = 100
_NOT_STORED = _('It was not stored: INBOX["KEEP_HISTORY"] was None when the message was handled.')


_WHY = {
    State.RECEIVED: _("It is stored. A process that runs its handler runs it when it is due."),
    State.RETRYING: _("Its last attempt failed. It is run again when it is due."),
    State.DEAD: _("It is not run again unless an operator retries it."),
    State.DONE: _("Its handler has run, and its effect is committed."),
    State.SKIPPED: _("It was skipped: its effect does not happen, for the reason below."),
    State.SHED: _("It was not run, because its handler sheds messages."),
}
"""Why a message is in its state, if nothing else is known."""
IS_DEFERRED = Q(state=State.RETRYING, error_class=DEFERRED)
"""Its handler deferred it. That is not a failure."""


class InboxStuckFilter(filters.StuckFilter):
    failing = (State.DEAD, State.RETRYING)

    def conditions(self, model_admin: Any) -> filters.Conditions:
        return {
            **super().conditions(model_admin),
            "quarantined": (_("In quarantine"), Q(state=State.DEAD, **states.OVERRIDE.needs)),
        }

    def failed(self) -> Q:
        return super().failed() & ~IS_DEFERRED

    def overdue(self, before: DatabaseTime) -> Q:
        return Q(state__in=[State.RECEIVED, State.WAITING, State.RUNNING]) & (
            Q(next_attempt_at__lt=before) | Q(next_attempt_at__isnull=True, received_at__lt=before)
        )


class InboxStateFilter(filters.StateFilter):
    """Deferred messages, which are `retrying` as well, are listed apart from those that failed."""

    def conditions(self, model_admin: Any) -> filters.Conditions:
        found = {}
        for state, (label, condition) in super().conditions(model_admin).items():
            found[state] = label, condition & ~IS_DEFERRED if state == State.RETRYING else condition
            if state == State.RETRYING:
                found["later"] = _("Later"), IS_DEFERRED
        return found


class DuplicatesFilter(filters.ConditionFilter):
    """Filter by duplicates."""

    title = _("duplicates")
    parameter_name = "duplicates"
    fixed: ClassVar[Any] = {
        "any": (_("Delivered more than once"), Q(duplicates__gt=0)),
        "conflicting": (_("With different content"), Q(conflicts__gt=0)),
    }


class HandlerFilter(filters.ValueFilter):
    """Filter by handler. Those of this process are offered."""

    title = _("handler")
    parameter_name = "handler"

    def known(self, model_admin: Any) -> Sequence[str]:
        return sorted(handler.name for handler in registry.all())


@admin.register(InboxMessage)
class InboxMessageAdmin(MessageAdmin):
    large_columns = ("body", "headers", "traceback", "failures", "result", "conflicting_body")
    identity = ("message_id", "handler")
    refusals = REFUSALS
    actions = (RETRY, EDIT, DRY_RUN, SKIP, OVERRIDE, RUN_CONFLICTING, EXPORT)

    list_display = ("state_badges", "summary", "age", "error_headline")
    list_display_links = ("summary",)
    list_filter = (
        InboxStuckFilter,
        InboxStateFilter,
        filters.ErrorClassFilter,
        FailureFilter,
        filters.TopicFilter,
        HandlerFilter,
        DuplicatesFilter,
        filters.AgeFilter,
        filters.AttemptsFilter,
        filters.HostFilter,
    )
    life_after = 3
    born_column = "received_at"
    unsettled = Q(state__in=(*_HEADS, State.WAITING))
    search_help_text = _(
        "An exact message id, biz-id, topic or handler, or a part of an error; a prefix of a topic or biz-id with a * at the "
        "end; key:customer-4 or headers.tenant:acme."
    )
    fieldsets = (
        (None, {"fields": ("state_explained", "error_text", "failing")}),
        (_("Content"), {"fields": ("payload", "headers_text", "content_type")}),
        (_("Attempts"), {"fields": ("attempts", "failed_attempts")}),
        (_("Correction"), {"fields": ("replaced_row", "replacing_row")}),
        (_("Further deliveries"), {"fields": ("further_deliveries", "conflict")}),
        (_("Progress"), {"fields": ("steps_text", "result_text")}),
        (_("Message"), {"fields": ("handler_name", "topic_name", "biz_id_name", "message_id_name", "key_name")}),
        (_("Times"), {"fields": ("created", "received", "next_attempt", "settled")}),
        (_("Origin"), {"fields": ("source_name", "correlation_id_name", "causation_id_name", "traceparent_name")}),
    )
    nothing = _("No messages yet. Every message that a handler of this database receives is listed here, the newest first.")

    def topics(self) -> Sequence[str]:
        """Those that the handlers of this process receive: a query for those in the table would read all of it."""
        return sorted({topic for handler in registry.all() for topic in handler.topics})

    def redaction(self) -> Redaction:
        return Redaction(inbox_options().redact)

    def subject(self, row: Any) -> str:
        return visible(f"{row.message_id} ({row.topic} {row.biz_id}, {row.handler})")

    def called(self, term: str) -> Q:
        """Also by handler, and by the message id of the latest duplicate with different content.

        The index of topics and biz-ids is that of receipts. Messages have none of topics, so a search for a topic reads all of
        them, and any other search must not.
        """
        handlers, topics = accounting.handlers_and_topics(self.using)
        of_biz_id = Receipt.objects.using(self.using).filter(handler__in=handlers, topic__in=topics, biz_id=term)
        by_name = Q(handler=term) | Q(pk__in=list(of_biz_id.values_list("pk", flat=True)))
        ids = {term, *([str(found), found.hex] if (found := uuid_in(term)) else [])}
        named = Q(message_id__in=sorted(ids)) | Q(conflicts__gt=0, conflicting_id__in=sorted(ids))
        return by_name | named | (Q(handler__in=handlers, topic=term) if term in topics else Q())

    def permits(self, request: HttpRequest, action: Action, row: Any = None) -> bool:
        """The page of a correction shows the payload as it is stored."""
        may_see = action is not EDIT or not self.redaction() or request.user.has_perm(permission(self.model, "unredacted"))
        return may_see and super().permits(request, action, row)

    # display

    def badge_of(self, row: Any) -> SafeString:
        if _is_deferred(row):
            return badge(_("Later"), Tone.LATER)
        return super().badge_of(row)

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        parts = super().get_fieldsets(request, obj)
        if request.user.has_perm(f"{self.opts.app_label}.view_step"):
            return parts
        return [(title, {"fields": [name for name in of["fields"] if name != "steps_text"]}) for title, of in parts]

    @admin.display(description=_("state"))
    def state_badges(self, row: Any) -> SafeString:
        """For the list: the state, and whether the message is quarantined, corrected, or has duplicates."""
        lines: list[str] = [self.badge_of(row)]
        if states.OVERRIDE.allows(row):
            lines.append(gettext("in quarantine"))
        if row.replaces_id is not None:
            lines.append(gettext("corrected"))
        if row.conflicts:
            lines.append(badge(gettext("%(count)s conflicting") % {"count": number(row.conflicts)}, Tone.STOPPED))
        elif row.duplicates:
            lines.append(format_html(gettext("{} more"), number(row.duplicates)))
        return stacked(*lines)

    def explanation(self, row: Any) -> SafeString:
        if states.OVERRIDE.allows(row):
            return warning(gettext("In quarantine: the inbox no longer knows whether it was handled before."))
        if row.state == State.WAITING:
            return self._behind(row)
        if row.state == State.RUNNING:
            return self._lease(row)
        if row.ordered and row.state in _HEADS:
            waiting = self._of_its_key(row).filter(at__gt=row.place or row.pk, state=State.WAITING)
            held = gettext("The later messages of its ordering key wait for it: %(count)s.") % {"count": counted(waiting)}
            return format_html("{}{}", self._why(row), note(held))
        return self._why(row)

    def _why(self, row: Any) -> SafeString:
        if row.state in DUE and PausedHandler.objects.using(self.using).filter(handler=row.handler).exists():
            return note(gettext("Its handler is paused. It is run when the handler is resumed."))
        if row.state == State.RECEIVED and (words := self._waits_for(row)):
            return note(words)
        if _is_deferred(row):
            return note(gettext("Its handler has deferred it, for the reason below. It is run again when it is due."))
        return note(_WHY.get(row.state, ""))

    def _waits_for(self, row: Any) -> SafeString | str:
        """What a stored message waits for, if the heartbeats of the consumers show it."""
        if run := where_run(self.using, row.handler, row.message_id):
            return format_html(gettext("A thread of {} runs it now: see the page Busy."), identifier(str(run.process)))
        if row.handler in unattended(self.using):
            return gettext("No consumer is running for its handler. %(remedy)s") % {"remedy": what_to_start()}
        if (busy := hanging(self.using).get(row.handler)) and busy.fills:
            words = gettext("It waits for a thread: other messages of its handler have been running for {} in {}.")
            return format_html(words, duration(busy.lasts), named(busy.processes))
        return ""

    def _behind(self, row: Any) -> SafeString:
        head = self._of_its_key(row).filter(at__lt=row.place or row.pk).order_by("at").first()
        if head is None:
            return note(gettext("No earlier message of its ordering key is open: a consumer will run it shortly."))
        words = gettext('It waits for an earlier message of its ordering key: <a href="{}">{}</a> ({}).')
        return note(format_html(words, *self.link_to(head)))

    def _lease(self, row: Any) -> SafeString:
        if row.next_attempt_at is None or row.next_attempt_at <= row.database_now:
            words = gettext(
                "Lease %(number)s has expired without a heartbeat of its owner. Another process takes over the message."
            )
            return note(words % {"number": row.fence})
        words = gettext("Lease {} ends {}, unless its owner extends it.")
        return note(format_html(words, row.fence, age(row.next_attempt_at, row.database_now)))

    def _of_its_key(self, row: Any) -> QuerySet[Any]:
        same = InboxMessage.objects.using(self.using).filter(day=LIVE, handler=row.handler, key=row.key, ordered=True)
        return same.alias(at=Coalesce("place", "pk", output_field=BigIntegerField())).defer(*self.large_columns)

    handler_name = shown(_("handler"), "handler", identifier)
    source_name = shown(_("source"), "source", identifier)

    @admin.display(description=_("topic, biz-id, handler"))
    def summary(self, row: Any) -> SafeString:
        return stacked(format_html("{} {}", identifier(row.topic), identifier(row.biz_id)), identifier(row.handler))

    @admin.display(description=_("age, attempts"), ordering="id")
    def age(self, row: Any) -> SafeString:
        received = format_html("{} {}", age(row.received_at, row.database_now), self.attempts_line(row))
        if row.next_attempt_at is None:
            return stacked(received)
        prefix = gettext("due ")
        if row.state == State.RUNNING:
            prefix = gettext("lease ends ") if row.next_attempt_at > row.database_now else gettext("lease ended ")
        return stacked(received, age(row.next_attempt_at, row.database_now, prefix))

    @admin.display(description=_("duplicates"))
    def further_deliveries(self, row: Any) -> SafeString:
        """The number of duplicates by cause."""
        business = row.duplicates - row.redeliveries - row.resends - row.replays
        causes = (
            (row.redeliveries, gettext("delivered again by the broker")),
            (row.resends, gettext("sent again by a relay")),
            (row.replays, gettext("sent again by an operator")),
            (business, gettext("published again with another message id")),
        )
        lines = [format_html("{} {}", number(count), words) for count, words in causes if count]
        total = format_html(gettext("{} in total; none was run"), number(row.duplicates))
        return stacked(total, *lines) if row.duplicates else NOTHING

    @admin.display(description=_("different content"))
    def conflict(self, row: Any) -> SafeString:
        """The latest delivery with this biz-id and different content."""
        content = {
            "row": row,
            "now": row.database_now,
            "not_stored": _NOT_STORED if _has_no_body(row) else "",
            "body": "" if row.conflicting_body is None else self._shown(row, row.conflicting_body),
            "flow": row.flow_url,
        }
        return render_to_string("exactly_once/conflict.html", content) if row.conflicts else NOTHING

    @admin.display(description=_("steps taken"))
    def steps_text(self, row: Any) -> SafeString:
        """Named steps whose results a retry reuses."""
        steps = [(step, self._shown_result(step.result)) for step in row.steps.order_by("taken_at", "pk")[:_STEPS]]
        content = {"steps": steps, "now": row.database_now}
        return render_to_string("exactly_once/steps.html", content) if steps else NOTHING

    @admin.display(description=_("result"))
    def result_text(self, row: Any) -> SafeString:
        return self._shown_result(row.result) if row.result is not None else NOTHING

    def _shown_result(self, result: Any) -> SafeString:
        # It is not a payload, and REDACT gets payloads only.
        return note(gettext("Not shown, because payloads are redacted.")) if self.redaction() else as_html(as_json(result))

    @admin.display(description=_("payload"))
    def payload(self, row: Any) -> SafeString:
        return note(_NOT_STORED) if _has_no_body(row) else self._shown(row, row.body)

    def _shown(self, row: Any, body: Any) -> SafeString:
        # The body of a webhook contains the payload in the field "data".
        field = "data" if row.handler.startswith(WEBHOOK_HANDLERS) else ""
        shown = replace(self.redaction(), field=field).shown(
            bytes(body), row.content_type, topic=row.topic, headers=row.headers, compression=compression_of(row)
        )
        return folded(gettext("Show the payload"), as_html(shown))

    @admin.display(description=_("headers"))
    def headers_text(self, row: Any) -> SafeString | str:
        return note(_NOT_STORED) if _has_no_body(row) else super().headers_text(row)

    @admin.display(description=_("replaces"))
    def replaced_row(self, row: Any) -> SafeString:
        """The dead message that this one replaces with a corrected payload."""
        rows = receipts.message(self.using, row.replaces_id) if row.replaces_id else InboxMessage.objects.none()
        return self._of_a_correction(rows.only("pk", "state", "biz_id").first(), row.replaces_id)

    @admin.display(description=_("replaced by"))
    def replacing_row(self, row: Any) -> SafeString:
        rows = InboxMessage.objects.using(self.using).filter(replaces=row.pk).only("pk", "state", "biz_id")
        found = newest(rows, 1) if row.state == State.SKIPPED else []
        return self._of_a_correction(next(iter(found), None), None)

    def _of_a_correction(self, other: Any, known: int | None) -> SafeString:
        if other is None:
            return note(gettext("Row %(number)s has been purged.") % {"number": known}) if known else NOTHING
        words = gettext('<a href="{}">row {}</a> {} {}')
        return format_html(words, self.own_url(other.pk), other.pk, identifier(other.biz_id), self.badge_of(other))

    @admin.display(description=_("last error, or reason"))
    def error_headline(self, row: Any) -> SafeString:
        """In grey if it is the reason why a handler deferred its message, which is not an error."""
        line = headline(row.last_error)
        return format_html('<span class="message-quiet">{}</span>', line) if _is_deferred(row) else line

    error_text = shown(_("last error, or reason"), "last_error", text)

    @admin.display(description=_("class and place"))
    def failing(self, row: Any) -> SafeString:
        """What failed and where; a link to the other messages that fail so."""
        return failure_text(self, row, row.error_class, row.error_place)

    @admin.display(description=_("failed attempts"))
    def failed_attempts(self, row: Any) -> SafeString:
        """Each with its traceback, the newest first."""
        return attempts(row.failures, row.last_error) if row.failures else text(row.traceback)

    received = instant(_("received"), "received_at")
    next_attempt = instant(_("next attempt, or end of its lease"), "next_attempt_at")


def _is_deferred(row: InboxMessage) -> bool:
    return row.state == State.RETRYING and row.error_class == DEFERRED


def _has_no_body(row: InboxMessage) -> bool:
    """Were body and headers removed when it was settled? Otherwise every done message has a body."""
    return row.state == State.DONE and not row.body

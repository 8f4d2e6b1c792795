"""Pending callbacks, and their last errors."""

from typing import Any

from django.contrib import admin
from django.db.models import F, Q, QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.actions import Action
from exactly_once.console.admin.filters import ConditionFilter, Conditions
from exactly_once.console.admin.html import Tone, age, badge, headline, identifier, labelled, stacked, text
from exactly_once.console.admin.pages import computed, instant, message_link, shown
from exactly_once.console.display import number, visible
from exactly_once.console.operators.changes import each
from exactly_once.wire.identity import uuid_in
from outbox.callbacks import registry
from outbox.models import PendingCallback
from outbox.operators import relays
from outbox.states import State

_TONES = {State.PUBLISHED: Tone.DONE, State.DEAD: Tone.STOPPED}


class TroubleFilter(ConditionFilter):
    """By the problem of a callback."""

    title = _("trouble")
    parameter_name = "trouble"

    def conditions(self, model_admin: Any) -> Conditions:
        return {
            "failing": (_("Has failed"), ~Q(last_error="")),
            "unknown": (_("Not known to this process"), ~Q(callback__in=registry.names)),
        }


_IS_BEING_CALLED = _("it is being called right now")
CALL_NOW = Action(
    name="call_now",
    label=_("Call now"),
    done=_("to be called now"),
    permission="run",
    perform=each(PendingCallback, lambda alias, pk, given: relays.call_now(alias, pk), _IS_BEING_CALLED),
)
DISCARD = Action(
    name="discard",
    label=_("Discard"),
    done=_("discarded"),
    perform=each(PendingCallback, lambda alias, pk, given: relays.discard_call(alias, pk), _IS_BEING_CALLED),
    question=_("Discard these callbacks? They are never called, so the project is not notified about their messages."),
    button=_("Discard the callbacks"),
)


@admin.register(PendingCallback)
class PendingCallbackAdmin(ActingAdmin):
    """Pending callbacks in the order of their next call."""

    kind = "callback"
    noun = _("callback")
    nouns = _("callbacks")
    nothing = _("No pending callbacks: every callback has returned.")
    hint = _("The next one to be called comes first. A relay calls it until it returns; then its row is deleted.")

    ordering = ("available_at", "id")
    search_fields = ("callback",)  # Makes the search box appear; called() reads it.
    search_help_text = _("The name of a callback, or a message id, biz-id or topic, exactly.")
    list_display = ("callback_name", "summary", "due_in", "calls", "error_headline")
    list_filter = (TroubleFilter,)
    actions = (CALL_NOW, DISCARD)
    fields = (
        "callback_name",
        "state_badge",
        "message_link",
        "calls",
        "due",
        "settled",
        "reason_text",
        "error_text",
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Pending callbacks with the id, topic and biz-id of their message, without its body."""
        named = {"uuid": F("message__message_id"), "topic": F("message__topic"), "biz_id": F("message__biz_id")}
        rows: QuerySet[Any] = super().get_queryset(request).annotate(**named)
        return rows

    def called(self, term: str) -> Q:
        named = Q(callback=term) | Q(message__topic=term) | Q(message__biz_id=term)
        return named | Q(message__message_id=name) if (name := uuid_in(term)) else named

    def subject(self, row: Any) -> str:
        name = f"{row.uuid} ({row.topic} {row.biz_id})"
        return visible(gettext("%(callback)s of message %(message)s") % {"callback": row.callback, "message": name})

    def badge_of(self, row: Any) -> SafeString:
        return badge(State(row.event).label, _TONES[State(row.event)])

    @admin.display(description=_("callback"))
    def callback_name(self, row: Any) -> SafeString:
        if row.callback in registry.names:
            return identifier(row.callback)
        return stacked(identifier(row.callback), badge(gettext("Not known here"), Tone.FAILING))

    @admin.display(description=_("event"))
    def summary(self, row: Any) -> SafeString:
        return stacked(self.badge_of(row), identifier(row.topic), identifier(row.biz_id))

    @admin.display(description=_("message"))
    def message_link(self, row: Any) -> SafeString:
        name = f"{row.uuid} ({row.topic} {row.biz_id})"
        return message_link(self.admin_site, self.package, row.message.pk, name)

    calls = computed(_("attempts"), lambda row: labelled(_("attempts"), number(row.attempts)))
    due_in = instant(_("due"), "available_at", age)
    due = instant(_("due"), "available_at")
    settled = instant(_("settled"), "settled_at")
    reason_text = shown(_("why it is dead"), "reason", text)
    error_headline = shown(_("last error"), "last_error", headline)
    error_text = shown(_("last error"), "last_error", text)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """These pages show data of messages, so they also require the permission to view messages."""
        return super().has_view_permission(request, obj) and request.user.has_perm(f"{self.opts.app_label}.view_outboxmessage")

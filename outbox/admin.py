"""The outbox in Django's admin: what waits, what failed and why, and what an operator may do about it."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString

from outbox import store
from outbox.conf import outbox_options
from outbox.kernel.clock import DatabaseTime
from outbox.kernel.display import (
    Tone,
    age,
    as_payload,
    identifier,
    moment,
    stacked,
)
from outbox.kernel.envelope import JSON
from outbox.kernel.message_admin import MessageAdmin, StateFilter, StuckFilter
from outbox.models import OutboxMessage, State


class OutboxStuckFilter(StuckFilter):
    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        overdue = Q(state__in=[State.READY, State.SCHEDULED], available_at__lt=DatabaseTime(-outbox_options().STUCK_AFTER))
        match self.value():
            case "any":
                return queryset.filter(Q(state__in=[State.DEAD, State.RETRYING]) | overdue)
            case "overdue":
                return queryset.filter(overdue)
            case _:
                return queryset


@admin.register(OutboxMessage)
class OutboxMessageAdmin(MessageAdmin):
    tones: ClassVar[Any] = {
        State.PREPARED: Tone.LATER,
        State.SCHEDULED: Tone.LATER,
        State.READY: Tone.OPEN,
        State.RETRYING: Tone.FAILING,
        State.PUBLISHED: Tone.DONE,
        State.DEAD: Tone.STOPPED,
        State.EXPIRED: Tone.OVER,
        State.CANCELLED: Tone.OVER,
        State.ROLLED_BACK: Tone.OVER,
    }
    allowed_in: ClassVar[Any] = {"requeue": store.REQUEUEABLE, "cancel": store.CANCELLABLE}
    confirmation_template = "outbox/admin/confirm.html"
    change_form_template = "outbox/admin/message.html"
    change_list_template = "outbox/admin/messages.html"

    list_display = ("state_badge", "summary", "age", "attempts", "error_headline", "message_id_name")
    list_display_links = ("summary",)
    list_filter = (OutboxStuckFilter, StateFilter)
    actions = ("requeue", "cancel")
    readonly_fields: ClassVar[Any] = (
        "state_badge",
        "topic_name",
        "biz_id_name",
        "message_id_name",
        "key_name",
        "attempts",
        "payload",
        "headers_text",
        "error_text",
        "created",
        "deliver",
        "due_exactly",
        "expires",
        "settled",
        "priority",
        "shard",
        "is_unique",
        "correlation_id_name",
        "causation_id_name",
        "traceparent_name",
    )
    fieldsets = (
        (None, {"fields": ("state_badge", "topic_name", "biz_id_name", "message_id_name", "key_name")}),
        ("Failure", {"fields": ("attempts", "error_text")}),
        ("Content", {"fields": ("payload", "headers_text")}),
        ("Times", {"fields": ("created", "deliver", "due_exactly", "expires", "settled")}),
        ("Routing", {"fields": ("priority", "shard", "is_unique")}),
        ("Origin", {"fields": ("correlation_id_name", "causation_id_name", "traceparent_name")}),
    )

    class Media:
        css: ClassVar[Any] = {"all": ["outbox/admin.css"]}

    def stuck_after(self) -> timedelta:
        return outbox_options().STUCK_AFTER

    def called(self, term: str) -> Q:
        try:
            return super().called(term) | Q(message_id=uuid.UUID(term))
        except ValueError:
            return super().called(term)

    @admin.display(description="topic, biz-id")
    def summary(self, row: Any) -> SafeString:
        return stacked(identifier(row.topic), identifier(row.biz_id))

    @admin.display(description="age", ordering="id")
    def age(self, row: Any) -> SafeString:
        created = age(row.created_at, row.database_now)
        if row.state not in {State.SCHEDULED, State.READY, State.RETRYING}:
            return created
        return stacked(created, age(row.available_at, row.database_now, "due "))

    @admin.display(description="payload")
    def payload(self, row: Any) -> SafeString:
        return as_payload(bytes(row.body), JSON).as_html()

    @admin.display(description="deliver at")
    def deliver(self, row: Any) -> SafeString:
        return moment(row.deliver_at, row.database_now)

    @admin.display(description="due")
    def due_exactly(self, row: Any) -> SafeString:
        return moment(row.available_at, row.database_now)

    @admin.display(description="expires")
    def expires(self, row: Any) -> SafeString:
        return moment(row.expires_at, row.database_now)

    def has_requeue_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("outbox.requeue_outboxmessage")

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("outbox.cancel_outboxmessage")

    @admin.action(permissions=["requeue"], description="Requeue")
    def requeue(self, request: HttpRequest, queryset: QuerySet[OutboxMessage]) -> HttpResponse | None:
        return self.carry_out(request, queryset, done="requeued", transition=store.requeue)

    @admin.action(permissions=["cancel"], description="Cancel…")
    def cancel(self, request: HttpRequest, queryset: QuerySet[OutboxMessage]) -> HttpResponse | None:
        if self.is_confirmed(request):
            return self.carry_out(request, queryset, done="cancelled", transition=store.cancel)
        return self.ask(
            request,
            queryset,
            action="cancel",
            question="Cancel these messages? No relay will send them any more. One whose confirmation was "
            "outstanding may be in the broker already.",
            button="Cancel the messages",
        )

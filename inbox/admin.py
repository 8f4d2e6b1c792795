"""The inbox in Django's admin: what was handled, what was not and why, and what an operator may do about it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString

from inbox import store
from inbox.conf import inbox_options
from inbox.handlers import registry
from inbox.models import InboxMessage, State
from outbox.kernel.clock import DatabaseTime
from outbox.kernel.display import (
    Tone,
    age,
    as_payload,
    as_text,
    identifier,
    moment,
    stacked,
    visible,
)
from outbox.kernel.message_admin import MessageAdmin, StateFilter, StuckFilter


class InboxStuckFilter(StuckFilter):
    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        before = DatabaseTime(-inbox_options().STUCK_AFTER)
        overdue = Q(state__in=[State.RECEIVED, State.WAITING, State.RUNNING]) & (
            Q(next_attempt_at__lt=before) | Q(next_attempt_at__isnull=True, received_at__lt=before)
        )
        match self.value():
            case "any":
                return queryset.filter(Q(state__in=[State.DEAD, State.RETRYING]) | overdue)
            case "overdue":
                return queryset.filter(overdue)
            case _:
                return queryset


class HandlerFilter(admin.SimpleListFilter):
    """By a handler of this process. Those that are gone are found by searching for their name."""

    title = "handler"
    parameter_name = "handler"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        return sorted((handler.name, handler.name) for handler in registry.all())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        known = {handler for handler, _ in self.lookup_choices}
        return queryset.filter(handler=self.value()) if self.value() in known else queryset


class SkipForm(forms.Form):
    reason = forms.CharField(
        max_length=500,
        widget=forms.TextInput(attrs={"class": "vTextField", "autofocus": True}),
        help_text="Why its effect must not happen. It is kept with the message and in the log.",
    )


@admin.register(InboxMessage)
class InboxMessageAdmin(MessageAdmin):
    tones: ClassVar[Any] = {
        State.RECEIVED: Tone.OPEN,
        State.RETRYING: Tone.FAILING,
        State.WAITING: Tone.LATER,
        State.RUNNING: Tone.OPEN,
        State.DONE: Tone.DONE,
        State.DEAD: Tone.STOPPED,
        State.SKIPPED: Tone.OVER,
        State.SHED: Tone.OVER,
    }
    large_columns = ("body", "headers", "traceback")
    allowed_in: ClassVar[Any] = {"retry": store.RETRYABLE, "skip": store.SKIPPABLE}
    confirmation_template = "inbox/admin/confirm.html"
    change_form_template = "inbox/admin/message.html"
    change_list_template = "inbox/admin/messages.html"

    list_display = ("state_badge", "summary", "age", "attempts", "error_headline", "message_id_name")
    list_display_links = ("summary",)
    list_filter = (InboxStuckFilter, StateFilter, HandlerFilter)
    search_help_text = "A message id, biz-id, topic or handler, exactly; with * at the end: everything that begins so (slower)."
    actions = ("retry", "skip")
    readonly_fields: ClassVar[Any] = (
        "state_badge",
        "handler_name",
        "topic_name",
        "biz_id_name",
        "message_id_name",
        "key_name",
        "attempts",
        "error_text",
        "traceback_text",
        "content_type",
        "payload",
        "headers_text",
        "created",
        "received",
        "next_attempt",
        "settled",
        "duplicates",
        "conflicts",
        "source_name",
        "correlation_id_name",
        "causation_id_name",
        "traceparent_name",
    )
    fieldsets = (
        (None, {"fields": ("state_badge", "handler_name", "topic_name", "biz_id_name", "message_id_name", "key_name")}),
        ("Failure", {"fields": ("attempts", "error_text", "traceback_text")}),
        ("Content", {"fields": ("content_type", "payload", "headers_text")}),
        ("Times", {"fields": ("created", "received", "next_attempt", "settled")}),
        ("Further deliveries", {"fields": ("duplicates", "conflicts")}),
        ("Origin", {"fields": ("source_name", "correlation_id_name", "causation_id_name", "traceparent_name")}),
    )

    class Media:
        css: ClassVar[Any] = {"all": ["inbox/admin.css"]}

    def stuck_after(self) -> timedelta:
        return inbox_options().STUCK_AFTER

    def subject(self, row: Any) -> str:
        return visible(f"{row.message_id} ({row.topic} {row.biz_id}, {row.handler})")

    def called(self, term: str) -> Q:
        ids = {term}
        with suppress(ValueError):
            ids |= {str(uuid.UUID(term)), uuid.UUID(term).hex}
        return super().called(term) | Q(handler=term) | Q(message_id__in=sorted(ids))

    @admin.display(description="handler")
    def handler_name(self, row: Any) -> SafeString:
        return identifier(row.handler)

    @admin.display(description="source")
    def source_name(self, row: Any) -> SafeString:
        return identifier(row.source)

    @admin.display(description="topic, handler, biz-id")
    def summary(self, row: Any) -> SafeString:
        return stacked(identifier(row.topic), identifier(row.handler), identifier(row.biz_id))

    @admin.display(description="age", ordering="id")
    def age(self, row: Any) -> SafeString:
        received = age(row.received_at, row.database_now)
        if row.next_attempt_at is None:
            return received
        return stacked(received, age(row.next_attempt_at, row.database_now, "due "))

    @admin.display(description="payload")
    def payload(self, row: Any) -> SafeString:
        return as_payload(bytes(row.body), row.content_type).as_html()

    @admin.display(description="traceback")
    def traceback_text(self, row: Any) -> SafeString:
        return as_text(row.traceback).as_html()

    @admin.display(description="received")
    def received(self, row: Any) -> SafeString:
        return moment(row.received_at, row.database_now)

    @admin.display(description="next attempt")
    def next_attempt(self, row: Any) -> SafeString:
        return moment(row.next_attempt_at, row.database_now)

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("inbox.retry_inboxmessage")

    def has_skip_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("inbox.skip_inboxmessage")

    @admin.action(permissions=["retry"], description="Retry now")
    def retry(self, request: HttpRequest, queryset: QuerySet[InboxMessage]) -> HttpResponse | None:
        return self.carry_out(request, queryset, done="due for a retry now", transition=store.retry)

    @admin.action(permissions=["skip"], description="Skip…")
    def skip(self, request: HttpRequest, queryset: QuerySet[InboxMessage]) -> HttpResponse | None:
        form = SkipForm(request.POST if self.is_confirmed(request) else None)
        if form.is_valid():
            reason = form.cleaned_data["reason"]
            transition = partial(store.skip, reason=reason)
            return self.carry_out(request, queryset, done="skipped", transition=transition, reason=reason)
        return self.ask(
            request,
            queryset,
            action="skip",
            question="Skip these messages? Their effect will not happen.",
            button="Skip the messages",
            form=form,
        )

"""Failure groups and bulk operations of the outbox."""

from __future__ import annotations

from typing import ClassVar

from django import forms
from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from outbox.console.failure_admin import FailureFilter, FailureGroupAdmin
from outbox.console.message_filters import ErrorClassFilter
from outbox.console.operation_admin import OperationAdmin
from outbox.console.planning import PlanForm, Planner
from outbox.models import FailureNote, Operation, OutboxMessage
from outbox.operations import ACTIONS, RESTORE_THEM, operations
from outbox.relay.replaying import REPLAY
from outbox.store.groups import groups, notes


class RestorePlanForm(PlanForm):
    overdue = forms.BooleanField(
        required=False,
        initial=True,
        label=_("Include overdue messages"),
        help_text=_("Messages whose time has passed are sent at once. Otherwise they are not changed."),
    )


planner = Planner(operations, ACTIONS, {RESTORE_THEM.name: RestorePlanForm})


class OutboxFailureFilter(FailureFilter):
    """By the broker's answer and the topic."""

    groups = groups


class OutboxErrorClassFilter(ErrorClassFilter):
    """By the broker's answer."""

    groups = groups


@admin.register(FailureNote)
class OutboxFailureGroupAdmin(FailureGroupAdmin):
    """By the broker's answer and the topic."""

    groups = groups
    notes = notes
    planner = planner
    messages_model = OutboxMessage
    view_permission = f"{OutboxMessage._meta.app_label}.view_outboxmessage"
    place_label = _("Topic")
    who_label = _("Topics")


@admin.register(Operation)
class OutboxOperationAdmin(OperationAdmin):
    """Operations on messages of the outbox."""

    table = operations
    bulk_actions: ClassVar = {**ACTIONS, REPLAY.name: REPLAY}
    view_permission = f"{OutboxMessage._meta.app_label}.view_outboxmessage"

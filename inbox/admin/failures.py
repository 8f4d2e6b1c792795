"""Failure groups and bulk operations of the inbox."""

from __future__ import annotations

from typing import ClassVar

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from inbox.models import FailureNote, InboxMessage, Operation
from inbox.operations import ACTIONS, operations
from inbox.store.groups import groups, notes
from outbox.console.failure_admin import FailureFilter, FailureGroupAdmin
from outbox.console.message_filters import ErrorClassFilter
from outbox.console.operation_admin import OperationAdmin
from outbox.console.planning import Planner

planner = Planner(operations, ACTIONS)


class InboxFailureFilter(FailureFilter):
    """By exception class and place."""

    groups = groups


class InboxErrorClassFilter(ErrorClassFilter):
    """By the class of the exception."""

    groups = groups


@admin.register(FailureNote)
class InboxFailureGroupAdmin(FailureGroupAdmin):
    """By exception class and place."""

    groups = groups
    notes = notes
    planner = planner
    messages_model = InboxMessage
    view_permission = f"{InboxMessage._meta.app_label}.view_inboxmessage"
    place_label = _("Place")
    who_label = _("Handlers")


@admin.register(Operation)
class InboxOperationAdmin(OperationAdmin):
    """Operations on messages of the inbox."""

    table = operations
    bulk_actions: ClassVar = ACTIONS
    view_permission = f"{InboxMessage._meta.app_label}.view_inboxmessage"

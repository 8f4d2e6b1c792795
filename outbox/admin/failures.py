"""Failure groups and bulk operations of the outbox."""

from __future__ import annotations

from django import forms
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.failures import FailingMessages, FailureFilter, register_failing
from exactly_once.admin.message_filters import ErrorClassFilter
from exactly_once.admin.planning import PlanForm, Planner
from exactly_once.operators.operations import BulkActions, register_bulk_actions
from outbox.models import OutboxMessage
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


register_failing(
    FailingMessages(
        groups=groups, notes=notes, planner=planner, model=OutboxMessage, place_label=_("Topic"), who_label=_("Topics")
    )
)
register_bulk_actions(
    operations.app,
    BulkActions(
        actions={**ACTIONS, REPLAY.name: REPLAY},
        label=OutboxMessage._meta.app_label,
        view=f"{OutboxMessage._meta.app_label}.view_outboxmessage",
    ),
)

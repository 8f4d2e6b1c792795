"""Failure groups and bulk operations of the inbox."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from exactly_once.admin.failures import FailingMessages, FailureFilter, register_failing
from exactly_once.admin.message_filters import ErrorClassFilter
from exactly_once.admin.planning import Planner
from exactly_once.operators.operations import BulkActions, register_bulk_actions
from inbox.models import InboxMessage
from inbox.operations import ACTIONS, operations
from inbox.store.groups import groups, notes

planner = Planner(operations, ACTIONS)


class InboxFailureFilter(FailureFilter):
    """By exception class and place."""

    groups = groups


class InboxErrorClassFilter(ErrorClassFilter):
    """By the class of the exception."""

    groups = groups


register_failing(
    FailingMessages(
        groups=groups, notes=notes, planner=planner, model=InboxMessage, place_label=_("Place"), who_label=_("Handlers")
    )
)
register_bulk_actions(
    operations.app,
    BulkActions(actions=ACTIONS, label=InboxMessage._meta.app_label, view=f"{InboxMessage._meta.app_label}.view_inboxmessage"),
)

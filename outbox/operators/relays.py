"""Relay processes as operators see them, and the callbacks that they call."""

from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.utils.translation import gettext

from exactly_once.console.display import number
from exactly_once.console.operators import alerts
from exactly_once.sql.connections import with_table
from exactly_once.sql.counts import LIMIT
from exactly_once.sql.now import DatabaseTime
from outbox.conf import outbox_options
from outbox.models import SHARDS, OutboxMessage, PendingCallback
from outbox.relay.heartbeat import relays
from outbox.states import State


def counts(row: Any) -> Sequence[str]:
    shards = row.facts["shards"]
    return [
        gettext("{} published").format(number(row.facts["published"])),
        gettext("shards {}").format(f"{shards} / {SHARDS}" if shards else "-"),
    ]


def missing(alias: str) -> str:
    if relays.rows(alias).filter(silent=False).exists() or not with_table(OutboxMessage, [alias])[0]:
        return ""
    unsent = (Q(state=State.READY), Q(state=State.SCHEDULED, available_at__lte=DatabaseTime()))
    due = sum(OutboxMessage.objects.using(alias).filter(each)[: LIMIT + 1].count() for each in unsent)
    count = f"{LIMIT:,}+" if due > LIMIT else f"{due:,}"
    return gettext("No relay is running. Messages that are due: %(count)s.") % {"count": count}


def call_now(alias: str, pending: int) -> bool:
    """Make a callback due now. False: it does not exist any more, or is being called."""
    return _unless_in_hand(alias, pending, lambda row: row.update(available_at=DatabaseTime()))


def discard_call(alias: str, pending: int) -> bool:
    """Delete a pending callback. False: it does not exist any more, or is being called."""
    return _unless_in_hand(alias, pending, lambda row: row.delete()[0])


def hanging(alias: str) -> dict[str, alerts.Hanging]:
    """By callback, or topic of a checker, the calls that have lasted longer than `STUCK_AFTER`."""
    return alerts.hanging(relays.rows(alias).filter(silent=False), outbox_options().STUCK_AFTER)


def _unless_in_hand(alias: str, pending: int, write: Any) -> bool:
    with transaction.atomic(using=alias):
        row = PendingCallback.objects.using(alias).filter(pk=pending)
        return row.select_for_update(skip_locked=True).first() is not None and bool(write(row))

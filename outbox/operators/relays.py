"""Relay processes, as operators see them."""

from collections.abc import Sequence
from typing import Any

from django.db.models import Q
from django.utils.translation import gettext

from exactly_once.console.display import number
from exactly_once.sql.connections import with_table
from exactly_once.sql.counts import LIMIT
from exactly_once.sql.now import DatabaseTime
from outbox.models import SHARDS, OutboxMessage
from outbox.states import State
from outbox.store.heartbeats import relays


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

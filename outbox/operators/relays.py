"""Relay processes, as operators see them."""

from collections.abc import Sequence
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.operators.heartbeat_table import ProcessKind
from exactly_once.plurals import number
from exactly_once.sql.connections import with_table
from exactly_once.sql.counts import LIMIT
from outbox.models import SHARDS, OutboxMessage
from outbox.states import State
from outbox.store.heartbeats import relays


def _counts(row: Any) -> Sequence[str]:
    shards = row.facts["shards"]
    return [
        gettext("{} published").format(number(row.facts["published"])),
        gettext("shards {}").format(f"{shards} / {SHARDS}" if shards else "-"),
    ]


def _missing(alias: str) -> str:
    if relays.rows(alias).filter(silent=False).exists() or not with_table(OutboxMessage, [alias])[0]:
        return ""
    ready = OutboxMessage.objects.using(alias).filter(state=State.READY)[: LIMIT + 1].count()
    count = f"{LIMIT:,}+" if ready > LIMIT else f"{ready:,}"
    return gettext("No relay is running. Messages that are ready: %(count)s.") % {"count": count}


RELAYS = ProcessKind(name=_("relay"), heartbeats=relays, counts=_counts, missing=_missing)

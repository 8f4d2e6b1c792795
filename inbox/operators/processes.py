"""Consumer processes as operators see them: which handlers no process runs, and what to start."""

from collections.abc import Sequence
from typing import Any

from django.db.models import QuerySet
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.broker import is_local
from exactly_once.operators.heartbeat_table import HeartbeatTable, ProcessKind
from exactly_once.plurals import number
from exactly_once.process.heartbeat import FORGOTTEN_AFTER
from exactly_once.sql.now import DatabaseTime
from inbox.conf import inbox_options
from inbox.handlers.registry import registry

consumers = HeartbeatTable("inbox")


def running_handlers(alias: str) -> set[str]:
    """The names of the handlers on a database that a process runs, according to the heartbeats."""
    return _handlers(consumers.rows(alias).filter(silent=False))


def lately_running_handlers(alias: str) -> set[str]:
    """The same, with those of processes that were killed within the last day or have stopped within the last hour."""
    return _handlers(consumers.known(alias).filter(beat_at__gte=DatabaseTime(-FORGOTTEN_AFTER)))


def _handlers(processes: QuerySet[Any]) -> set[str]:
    return {name for names in processes.values_list("facts__handlers", flat=True) for name in names}


def unattended(alias: str) -> list[str]:
    """The names of this project's handlers on a database that no process runs, according to the heartbeats."""
    running = running_handlers(alias)
    return sorted(handler.name for handler in registry.all() if handler.using == alias and handler.name not in running)


def what_to_start() -> str:
    """The remedy for `unattended` handlers."""
    if is_local(inbox_options().broker_url):
        return gettext("Any messages for them wait in the database. Start outbox_relay or inbox_consume.")
    return gettext("Any messages for them wait in the broker's queues. Start inbox_consume; if it runs, read its log.")


def _counts(row: Any) -> Sequence[str]:
    return [
        gettext("{} deliveries").format(number(row.facts["received"])),
        gettext("{} stored run").format(number(row.facts["ran"])),
    ]


def _missing(alias: str) -> str:
    names = unattended(alias)
    words = gettext("No consumer is running for: %(names)s. %(remedy)s")
    return words % {"names": ", ".join(names), "remedy": what_to_start()} if names else ""


CONSUMERS = ProcessKind(name=_("consumer"), heartbeats=consumers, counts=_counts, missing=_missing)

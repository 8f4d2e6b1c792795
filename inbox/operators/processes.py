"""Consumer processes as operators see them: which handlers no process runs, and what to start."""

from collections.abc import Sequence
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.broker import is_local
from exactly_once.operators.heartbeat_table import ProcessKind
from exactly_once.plurals import number
from inbox.conf import inbox_options
from inbox.handlers.registry import registry
from inbox.store.heartbeats import consumers, running_handlers


def unattended(alias: str) -> list[str]:
    """The names of this project's handlers on a database that no process runs, according to the heartbeats."""
    running = running_handlers(alias)
    return sorted(handler.name for handler in registry.all() if handler.using == alias and handler.name not in running)


def what_to_start() -> str:
    """The remedy for `unattended` handlers."""
    if is_local(inbox_options().broker_url):
        return gettext("Their messages wait in the database. Start outbox_relay or inbox_consume.")
    return gettext("Their messages wait in the broker's queues. Start inbox_consume; if it runs, read its log.")


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

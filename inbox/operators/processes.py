"""Consumer processes as operators see them: which handlers no process runs, and what to start."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.utils.translation import gettext

from exactly_once.console.display import number
from exactly_once.console.operators import alerts
from exactly_once.transport.broker import is_local
from inbox.conf import inbox_options
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.states import SETTLED, State
from inbox.store.handler_rows import consumers, running_handlers


def queued(alias: str) -> dict[str, int]:
    """By handler, the messages in its queues at the broker, as the consumers have last read them: every half a minute."""
    found: dict[str, int] = {}
    for counts in consumers.rows(alias).filter(silent=False).values_list("facts__queued", flat=True):
        for name, count in (counts or {}).items():
            found[name] = max(count, found.get(name, 0))
    return found


def hanging(alias: str) -> dict[str, alerts.Hanging]:
    """By handler, its runs that have lasted longer than `STUCK_AFTER`."""
    found = alerts.hanging(consumers.rows(alias).filter(silent=False), inbox_options().STUCK_AFTER)
    for name, one in found.items():
        one.blocks = _is_waited_for(alias, name, one.messages)
    return found


def _is_waited_for(alias: str, handler: str, messages: Sequence[str]) -> bool:
    in_order = InboxMessage.objects.using(alias).filter(handler=handler, ordered=True).exclude(state__in=SETTLED)
    keys = [*in_order.filter(message_id__in=messages).values_list("key", flat=True)]
    return bool(keys) and in_order.filter(key__in=keys, state=State.WAITING).exists()


class Run(NamedTuple):
    """A run of a message, as a heartbeat says: the process, the thread in it, and when the run began."""

    process: Any
    thread: str
    since: datetime


def where_run(alias: str, handler: str, message_id: str) -> Run | None:
    """The latest run of this message in a live process."""
    runs = (
        Run(process, run["thread"], process.started_at + timedelta(seconds=run["began"]))
        for process in consumers.rows(alias).filter(silent=False)
        for run in process.running
        if (run["what"], run["message"]) == (handler, message_id)
    )
    return max(runs, key=lambda run: run.since, default=None)


def unattended(alias: str) -> list[str]:
    """The names of this project's handlers on a database that no process runs, according to the heartbeats."""
    running = running_handlers(alias)
    return sorted(handler.name for handler in registry.all() if handler.using == alias and handler.name not in running)


def what_to_start() -> str:
    """The remedy for `unattended` handlers."""
    if is_local(inbox_options().broker_url):
        return gettext("Any messages for them wait in the database. Start outbox_relay or inbox_consume.")
    return gettext("Any messages for them wait in the broker's queues. Start inbox_consume; if it runs, read its log.")


def counts(row: Any) -> Sequence[str]:
    return [
        gettext("{} deliveries").format(number(row.facts["received"])),
        gettext("{} stored run").format(number(row.facts["ran"])),
    ]


def missing(alias: str) -> str:
    names = unattended(alias)
    words = gettext("No consumer is running for: %(names)s. %(remedy)s")
    return words % {"names": ", ".join(names), "remedy": what_to_start()} if names else ""

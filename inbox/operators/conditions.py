"""The conditions that raise alerts of the inbox; see `exactly_once.upkeep.alerting`."""

from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any

from django.db.models import Count

from exactly_once.conf.app_options import AlertOptions
from exactly_once.console.display import duration
from exactly_once.console.operators.alerts import PAUSED_TOO_LONG, failing, silent, window
from exactly_once.half import Key
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.minutes import Minutes
from inbox.conf import inbox_options
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, PausedHandler
from inbox.operators.processes import hanging, queued
from inbox.states import DUE, State
from inbox.store.due import stored_handlers
from inbox.store.handler_rows import consumers, running_handlers


def newly_conflicting(alias: str, within: timedelta) -> dict[str, int]:
    """By handler, how many messages have got a duplicate with other content within this time that no operator has run."""
    rows = InboxMessage.objects.using(alias).filter(conflicts__gt=0, conflicting_attributes__isnull=False)
    recent = rows.filter(conflicting_at__gte=DatabaseTime(-within))
    return dict(recent.order_by("handler").values_list("handler").annotate(Count("pk")))


def _of_handlers(alias: str, options: AlertOptions, paused: Collection[str]) -> Iterator[tuple[Key, str]]:
    """Handlers that hang, that fail, and whose queues are long."""
    for name, one in hanging(alias).items():
        if one.fills or one.blocks:
            waiting = ", and later messages of its ordering key wait" if one.blocks else ""
            words = (
                f"It has been running for {duration(one.lasts)} in {len(one.messages)} of {one.threads} threads of "
                f"{', '.join(one.processes)}{waiting}. See its stack on the page Busy, and set timeout= to limit a run."
            )
            yield ("hanging", name), words
    yield from failing(MINUTES, alias, paused, "handled", "failed")
    for name, number in queued(alias).items():
        if number > options.BACKLOG and name not in paused:
            yield ("backlog", name), f"Messages in its queues at the broker: {number:,}. Start more consumers."


def conditions(alias: str, options: AlertOptions) -> dict[Key, str]:
    found: dict[Key, str] = {}
    messages, stored = InboxMessage.objects.using(alias), set(stored_handlers(alias))
    paused_rows: Any = PausedHandler.objects.using(alias).annotate(database_now=DatabaseTime())
    paused = {row.handler: row for row in paused_rows}
    ours = {handler.name for handler in registry.all() if handler.using == alias}
    # Messages at the broker cannot be seen here. Where consumers run, or have run lately, every handler is taken to have some.
    expected = ours if consumers.known(alias).exists() else ours & stored
    for name in expected - running_handlers(alias):
        found["no_consumer", name] = "No consumer is running for it. Start inbox_consume, or look into its log."
    found |= silent(consumers.rows(alias))
    found |= _of_handlers(alias, options, paused)
    overdue = inbox_options().STUCK_AFTER
    due = messages.filter(state__in=DUE, next_attempt_at__lt=DatabaseTime(-overdue))
    for name in stored - set(paused):
        if due.filter(handler=name).exists():
            found["lag", name] = f"A stored message has been due for more than {duration(overdue)} and is not run."
    if dead := messages.filter(state=State.DEAD, settled_at__gte=DatabaseTime(-window(options))).count():
        found["dead", ""] = f"New dead letters within {duration(window(options))}: {dead:,}. Retry, correct or skip them."
    for name, number in newly_conflicting(alias, window(options)).items():
        found["conflicts", name] = (
            f"Messages that got a delivery with their biz-id and other content within {duration(window(options))}: "
            f"{number:,}. It was not run. If it is another fact, run it as its own message in the admin, and correct biz_id= "
            "of the handler, or the publisher."
        )
    for name, row in paused.items():
        if row.database_now - row.paused_at > PAUSED_TOO_LONG:
            why = f": {row.reason}" if row.reason else ""
            words = f"It has been paused for more than {duration(PAUSED_TOO_LONG)} by {row.paused_by}{why}"
            found["handler_paused", name] = words
    return found


MINUTES = Minutes("inbox")

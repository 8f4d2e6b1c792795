"""The conditions that raise alerts of the inbox; see `exactly_once.operators.alerts`."""

from __future__ import annotations

from exactly_once.display import duration
from exactly_once.operators.alert_options import AlertOptions
from exactly_once.operators.alert_table import Key
from exactly_once.operators.alerts import Conditions
from inbox.conf import inbox_options
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.store import alerting, heartbeats


def _evaluate(alias: str, options: AlertOptions) -> dict[Key, str]:
    found: dict[Key, str] = {}
    paused, stored = alerting.paused(alias), alerting.due_handlers(alias)
    ours = {handler.name for handler in registry.all() if handler.using == alias}
    # Messages at the broker cannot be seen here. Where consumers run, or have run lately, every handler is taken to have some.
    expected = ours if alerting.has_consumers(alias) else ours & stored
    for name in expected - heartbeats.running_handlers(alias):
        found["no_consumer", name] = "No consumer is running for it. Start inbox_consume, or look into its log."
    for name in stored - set(paused):
        if alerting.is_late(alias, name, options.LAG):
            found["lag", name] = f"A stored message has been due for more than {duration(options.LAG)} and is not run."
    if (dead := alerting.newly_dead(alias, options.DEAD_WITHIN)) >= options.DEAD:
        found["dead", ""] = f"New dead letters within {duration(options.DEAD_WITHIN)}: {dead:,}. Retry, correct or skip them."
    for name, number in alerting.newly_conflicting(alias, options.DEAD_WITHIN).items():
        found["conflicts", name] = (
            f"Messages that got a delivery with their biz-id and other content within {duration(options.DEAD_WITHIN)}: "
            f"{number:,}. It was not run. If it is another fact, run it as its own message in the admin, and correct biz_id= "
            "of the handler, or the publisher."
        )
    for name, row in paused.items():
        if row.database_now - row.paused_at > options.PAUSED_FOR:
            why = f": {row.reason}" if row.reason else ""
            words = f"It has been paused for more than {duration(options.PAUSED_FOR)} by {row.paused_by}{why}"
            found["handler_paused", name] = words
    return found


CONDITIONS = Conditions(evaluate=_evaluate, options=lambda: inbox_options().alerts, messages=InboxMessage)

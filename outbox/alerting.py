"""The conditions that raise alerts of the outbox; see `exactly_once.operators.alerts`."""

from __future__ import annotations

from exactly_once.display import duration
from exactly_once.operators.alert_options import AlertOptions
from exactly_once.operators.alert_table import Key
from exactly_once.operators.alerts import Conditions
from outbox.conf import outbox_options
from outbox.models import OutboxMessage
from outbox.operators import alerting


def _evaluate(alias: str, options: AlertOptions) -> dict[Key, str]:
    found: dict[Key, str] = {}
    if not alerting.is_relayed(alias) and (alerting.has_waiting(alias) or alerting.was_relayed(alias)):
        found["no_relay", ""] = "No relay is running. Start outbox_relay, or look into its log."
    if alerting.is_late(alias, options.LAG):
        found["lag", ""] = f"A message has been ready for more than {duration(options.LAG)} and is not published."
    if (dead := alerting.newly_dead(alias, options.DEAD_WITHIN)) >= options.DEAD:
        found["dead", ""] = f"New dead messages within {duration(options.DEAD_WITHIN)}: {dead:,}. Restore or discard them."
    if stuck := alerting.stuck(alias):
        found["stuck_prepared", ""] = (
            f"Prepared messages whose checker does not know the outcome: {stuck:,}. Decide about them."
        )
    for topic in alerting.long_paused(alias, options.PAUSED_FOR):
        found["topic_paused", topic.topic] = _paused(topic.paused_by, topic.reason, options)
    return found


def _paused(by: str, reason: str, options: AlertOptions) -> str:
    why = f": {reason}" if reason else ""
    return f"It has been paused for more than {duration(options.PAUSED_FOR)} by {by or 'the circuit breaker'}{why}"


CONDITIONS = Conditions(evaluate=_evaluate, options=lambda: outbox_options().alerts, messages=OutboxMessage)

"""The conditions that raise alerts of the outbox; see `exactly_once.upkeep.alerting`.

No query reads more than one row for each shard, topic or dead message.
"""

from exactly_once.conf.app_options import AlertOptions
from exactly_once.console.display import duration
from exactly_once.console.operators.alerts import PAUSED_TOO_LONG, failing, silent, window
from exactly_once.half import Key
from exactly_once.sql.days import LIVE
from exactly_once.sql.now import DatabaseTime
from exactly_once.transport.interface import PublishOutcome
from exactly_once.upkeep.minutes import Minutes
from outbox.conf import outbox_options
from outbox.models import OutboxMessage, PausedTopic
from outbox.operators.changes import groups
from outbox.operators.figures import has_ready_for
from outbox.operators.relays import hanging
from outbox.relay.heartbeat import relays
from outbox.states import STOPPED, State, TopicState

_MOST = 100
_WAITING = [State.READY, State.RETRYING, State.SCHEDULED]


def unroutable(alias: str) -> dict[str, str]:
    """By topic with messages that no queue takes, up to a limit of topics: what the broker answers."""
    returned = PublishOutcome.RETURNED.value
    refused = PausedTopic.objects.using(alias).filter(mode=TopicState.REFUSED, error_class=returned)
    found = dict(refused.values_list("topic", "reason")[:_MOST])
    for topic in groups.places(alias, returned):
        rows = OutboxMessage.objects.using(alias).filter(groups.condition(returned, topic))
        found.setdefault(topic, rows.values_list("last_error", flat=True)[:1][0])
    return found


def conditions(alias: str, options: AlertOptions) -> dict[Key, str]:
    found: dict[Key, str] = {}
    live, processes = OutboxMessage.objects.using(alias).filter(day=LIVE), relays.rows(alias)
    if not processes.filter(silent=False).exists() and (
        live.filter(state__in=_WAITING).exists() or processes.filter(silent=True).exists()
    ):
        found["no_relay", ""] = "No relay is running. Start outbox_relay, or look into its log."
    found |= silent(processes)
    for topic, why in unroutable(alias).items():
        found["unroutable", topic] = f"Its messages cannot be delivered, and wait. {why}"
    for name, one in hanging(alias).items():
        found["hanging", name] = (
            f"This callback, or checker of a topic, has been running for {duration(one.lasts)} in {', '.join(one.processes)}. "
            "See its stack on the page Busy, set a timeout for what it waits for, and restart that relay."
        )
    paused = PausedTopic.objects.using(alias).filter(mode__in=STOPPED).values_list("topic", flat=True)
    known = {*paused, *(name for _condition, name in found)}
    found |= failing(MINUTES, alias, known, "published", "retried", "dead")
    overdue = outbox_options().STUCK_AFTER
    if has_ready_for(alias, overdue):
        found["lag", ""] = f"A message has been ready for more than {duration(overdue)} and is not published."
    if dead := live.filter(state=State.DEAD, settled_at__gte=DatabaseTime(-window(options))).count():
        found["dead", ""] = f"New dead messages within {duration(window(options))}: {dead:,}. Restore or discard them."
    if stuck := live.filter(state=State.STUCK).count():
        found["stuck_prepared", ""] = (
            f"Prepared messages whose checker does not know the outcome: {stuck:,}. Decide about them."
        )
    too_long = PausedTopic.objects.using(alias).filter(mode__in=STOPPED, paused_at__lt=DatabaseTime(-PAUSED_TOO_LONG))
    for row in too_long.order_by("topic"):
        if ("unroutable", row.topic) in found:
            continue
        why = f": {row.reason}" if row.reason else ""
        words = f"It has been paused for more than {duration(PAUSED_TOO_LONG)} by {row.paused_by or 'the circuit breaker'}"
        found["topic_paused", row.topic] = f"{words}{why}"
    return found


MINUTES = Minutes("outbox")

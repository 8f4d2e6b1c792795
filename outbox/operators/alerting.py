"""The conditions that raise alerts of the outbox; see `exactly_once.operators.alerts`.

No query reads more than one row for each shard, topic or dead message.
"""

from exactly_once.app_options import AlertOptions
from exactly_once.display import duration
from exactly_once.operators.alerts import Conditions, Key
from exactly_once.sql.days import LIVE
from exactly_once.sql.now import DatabaseTime
from outbox.conf import outbox_options
from outbox.models import OutboxMessage, PausedTopic
from outbox.operators.figures import has_ready_for
from outbox.states import State
from outbox.store.heartbeats import relays

_WAITING = [State.READY, State.RETRYING, State.SCHEDULED]


def _evaluate(alias: str, options: AlertOptions) -> dict[Key, str]:
    found: dict[Key, str] = {}
    live, processes = OutboxMessage.objects.using(alias).filter(day=LIVE), relays.rows(alias)
    if not processes.filter(silent=False).exists() and (
        live.filter(state__in=_WAITING).exists() or processes.filter(silent=True).exists()
    ):
        found["no_relay", ""] = "No relay is running. Start outbox_relay, or look into its log."
    if has_ready_for(alias, options.LAG):
        found["lag", ""] = f"A message has been ready for more than {duration(options.LAG)} and is not published."
    dead = live.filter(state=State.DEAD, settled_at__gte=DatabaseTime(-options.DEAD_WITHIN)).count()
    if dead >= options.DEAD:
        found["dead", ""] = f"New dead messages within {duration(options.DEAD_WITHIN)}: {dead:,}. Restore or discard them."
    if stuck := live.filter(state=State.STUCK).count():
        found["stuck_prepared", ""] = (
            f"Prepared messages whose checker does not know the outcome: {stuck:,}. Decide about them."
        )
    paused = PausedTopic.objects.using(alias).filter(is_resuming=False, paused_at__lt=DatabaseTime(-options.PAUSED_FOR))
    for topic in paused.order_by("topic"):
        why = f": {topic.reason}" if topic.reason else ""
        words = f"It has been paused for more than {duration(options.PAUSED_FOR)} by {topic.paused_by or 'the circuit breaker'}"
        found["topic_paused", topic.topic] = f"{words}{why}"
    return found


CONDITIONS = Conditions(evaluate=_evaluate, options=lambda: outbox_options().alerts, messages=OutboxMessage)

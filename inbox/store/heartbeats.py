"""Heartbeats of consumers; see `outbox.kernel.heartbeat`."""

from inbox.models import ConsumerHeartbeat
from outbox.database.heartbeat_table import HeartbeatTable

consumers = HeartbeatTable(ConsumerHeartbeat)


def running_handlers(alias: str) -> set[str]:
    """The names of the handlers on a database that a process runs, according to the heartbeats."""
    running = consumers.rows(alias).filter(silent=False).values_list("handlers", flat=True)
    return {name for names in running for name in names}

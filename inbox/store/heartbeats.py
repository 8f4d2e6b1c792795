"""Heartbeats of consumers; see `exactly_once.process.heartbeat`."""

from exactly_once.operators.heartbeat_table import HeartbeatTable

consumers = HeartbeatTable("inbox")


def running_handlers(alias: str) -> set[str]:
    """The names of the handlers on a database that a process runs, according to the heartbeats."""
    running = consumers.rows(alias).filter(silent=False).values_list("facts__handlers", flat=True)
    return {name for names in running for name in names}

"""Heartbeats of processes that run handlers; see `exactly_once.upkeep.heartbeat_table`."""

from exactly_once.upkeep.heartbeat_table import HeartbeatTable

consumers = HeartbeatTable("inbox")


def running_handlers(alias: str) -> set[str]:
    """The names of the handlers on a database that a process runs, according to the heartbeats."""
    running = consumers.rows(alias).filter(silent=False)
    return {name for names in running.values_list("facts__handlers", flat=True) for name in names}

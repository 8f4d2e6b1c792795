"""Heartbeats of relays; see `kernel.heartbeat`."""

from outbox.database.heartbeat_table import HeartbeatTable
from outbox.models import RelayHeartbeat

relays = HeartbeatTable(RelayHeartbeat)

"""Heartbeats of relays; see `exactly_once.process.heartbeat`."""

from exactly_once.operators.heartbeat_table import HeartbeatTable
from outbox.models import RelayHeartbeat

relays = HeartbeatTable(RelayHeartbeat)

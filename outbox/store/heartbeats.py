"""Heartbeats of relays; see `exactly_once.process.heartbeat`."""

from exactly_once.operators.heartbeat_table import HeartbeatTable

relays = HeartbeatTable("outbox")

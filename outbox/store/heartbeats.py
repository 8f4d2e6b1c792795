"""Heartbeats of relays; see `exactly_once.process.heartbeat`."""

from exactly_once.upkeep.heartbeat_table import HeartbeatTable

relays = HeartbeatTable("outbox")

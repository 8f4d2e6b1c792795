"""Heartbeats of consumers; see `outbox.kernel.heartbeat`."""

from inbox.models import ConsumerHeartbeat
from outbox.database.heartbeat_table import HeartbeatTable

consumers = HeartbeatTable(ConsumerHeartbeat)

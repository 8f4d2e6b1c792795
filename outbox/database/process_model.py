"""The columns of a heartbeat that relays and consumers have in common; see `kernel.heartbeat`."""

from __future__ import annotations

from django.db import models

from outbox.kernel.requests import Mode, Request
from outbox.kernel.text import NAME_LENGTH


class ProcessHeartbeat(models.Model):
    """The last heartbeat of one process, and the operator's last request to it. No guarantee depends on it."""

    id = models.UUIDField(primary_key=True)
    host = models.CharField(max_length=NAME_LENGTH)
    pid = models.PositiveIntegerField()
    version = models.CharField(max_length=32)
    started_at = models.DateTimeField("started")
    beat_at = models.DateTimeField("last heartbeat")
    waits_for = models.CharField(max_length=NAME_LENGTH, default="", blank=True)
    rate = models.FloatField("messages per second", default=0.0, db_default=0.0)
    memory_bytes = models.PositiveBigIntegerField("resident memory in bytes", null=True)
    # The time of the last heartbeat's statement and its commit, as the process saw it.
    database_ms = models.FloatField("database round trip in ms", null=True)
    broker_ms = models.FloatField("broker round trip in ms", null=True)
    mode = models.CharField(
        max_length=12,
        choices=[(mode.value, mode.value) for mode in Mode],
        default=Mode.RUNNING.value,
        db_default=Mode.RUNNING.value,
    )
    # An orderly end. NULL while it runs, and if it was killed.
    stopped_at = models.DateTimeField("stopped", null=True)
    requested = models.CharField(
        max_length=12, choices=[(request.value, request.value) for request in Request], default="", db_default="", blank=True
    )
    requested_by = models.CharField(max_length=NAME_LENGTH, default="", db_default="", blank=True)
    requested_at = models.DateTimeField(null=True)
    acknowledged_at = models.DateTimeField(null=True)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"

"""The columns of a heartbeat that relays and consumers have in common; see `process.heartbeat`."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from exactly_once.process.requests import Mode, Request
from exactly_once.wire.text import NAME_LENGTH


class ProcessHeartbeat(models.Model):
    """The last heartbeat of one process, and the operator's last request to it. No guarantee depends on it."""

    id = models.UUIDField(primary_key=True)
    host = models.CharField(max_length=NAME_LENGTH)
    pid = models.PositiveIntegerField()
    version = models.CharField(max_length=32)
    started_at = models.DateTimeField(_("started"))
    beat_at = models.DateTimeField(_("last heartbeat"))
    waits_for = models.CharField(max_length=NAME_LENGTH, default="", blank=True)
    rate = models.FloatField(_("messages per second"), default=0.0, db_default=0.0)
    memory_bytes = models.PositiveBigIntegerField(_("resident memory in bytes"), null=True)
    # The time of the last heartbeat's statement and its commit, as the process saw it.
    database_ms = models.FloatField(_("database round trip in ms"), null=True)
    broker_ms = models.FloatField(_("broker round trip in ms"), null=True)
    mode = models.CharField(
        max_length=12,
        choices=[(mode.value, mode.value) for mode in Mode],
        default=Mode.RUNNING.value,
        db_default=Mode.RUNNING.value,
    )
    # An orderly end. NULL while it runs, and if it was killed.
    stopped_at = models.DateTimeField(_("stopped"), null=True)
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

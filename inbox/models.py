"""The inbox table: one row per message and handler, unique on what the business calls the fact."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from outbox.kernel.text import NAME_LENGTH


class State(models.TextChoices):
    """Where a message is in one handler. Every transition is one guarded statement in `inbox.store`."""

    RECEIVED = "received"
    RETRYING = "retrying"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"
    SKIPPED = "skipped"
    SHED = "shed"


DUE = (State.RECEIVED, State.RETRYING)
"""States from which a message is run when its next attempt is due."""

SETTLED = (State.DONE, State.SKIPPED, State.SHED)
"""States in which nothing more will happen and nobody is waited for; these rows may be purged."""


class InboxMessage(models.Model):
    """That one handler has seen one message, and what became of it."""

    id = models.BigAutoField(primary_key=True)
    handler = models.CharField(max_length=NAME_LENGTH)
    topic = models.CharField(max_length=NAME_LENGTH)
    biz_id = models.CharField("biz-id", max_length=NAME_LENGTH)
    message_id = models.CharField("message id", max_length=NAME_LENGTH)
    key = models.CharField("ordering key", max_length=NAME_LENGTH, default="")
    state = models.CharField(max_length=12, choices=State)
    attempts = models.PositiveIntegerField(default=0)
    content_type = models.CharField(max_length=NAME_LENGTH)
    body = models.BinaryField()
    digest = models.CharField(max_length=64)
    headers = models.JSONField(default=dict)
    source = models.CharField(max_length=NAME_LENGTH, default="")
    correlation_id = models.CharField(max_length=NAME_LENGTH, default="")
    causation_id = models.CharField(max_length=NAME_LENGTH, default="")
    traceparent = models.CharField(max_length=NAME_LENGTH, default="")
    # Deliveries that came after the first, and how many of them said something else under the same biz-id.
    duplicates = models.PositiveIntegerField(default=0)
    conflicts = models.PositiveIntegerField(default=0)
    last_error = models.TextField(default="")
    traceback = models.TextField(default="")
    created_at = models.DateTimeField(null=True)
    received_at = models.DateTimeField()
    # NULL while a transaction is running the message, which nobody else ever sees, and in settled states.
    next_attempt_at = models.DateTimeField(null=True)
    settled_at = models.DateTimeField(null=True)

    class Meta:
        verbose_name = "inbox message"
        default_permissions = ("view",)
        permissions = (
            ("retry_inboxmessage", "Can retry a dead or retrying message"),
            ("skip_inboxmessage", "Can skip a message that is not done"),
        )
        constraints = (models.UniqueConstraint(fields=["handler", "topic", "biz_id"], name="inbox_once"),)
        indexes = (
            models.Index(fields=["next_attempt_at"], name="inbox_due", condition=Q(state__in=["received", "retrying"])),
            models.Index(
                fields=["state", "handler"],
                name="inbox_open",
                condition=Q(state__in=["received", "retrying", "waiting", "running", "dead"]),
            ),
            models.Index(fields=["settled_at"], name="inbox_settled", condition=Q(state__in=["done", "skipped", "shed"])),
            models.Index(fields=["message_id"], name="inbox_message_id"),
        )

    def __str__(self) -> str:
        return f"{self.handler}: {self.topic} {self.biz_id} ({self.state})"

"""The outbox table: one row per message, its state in one column."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from outbox.database.fields import InstantField, ReadableJSONField
from outbox.kernel.identity import new_message_id
from outbox.kernel.text import NAME_LENGTH
from outbox.states import FIRST_DAY, LIVE, SETTLED, State

SHARDS = 64
"""Slices of the outbox. Fixed at insert, so changing it would break the order of keys in flight."""


class OutboxMessage(models.Model):
    """A message written in the transaction of its business change: live until it is settled, history from then on.

    On PostgreSQL the table is partitioned by `day`: what is live is one partition, and each day of history another, see
    `store.history`. On SQLite it is a plain table.
    """

    id = models.BigAutoField(primary_key=True)
    message_id = models.UUIDField("message id", unique=True, default=new_message_id, editable=False)
    topic = models.CharField(max_length=NAME_LENGTH)
    biz_id = models.CharField("biz-id", max_length=NAME_LENGTH)
    is_unique = models.BooleanField("unique by topic and biz-id", default=False, editable=False)
    key = models.CharField("ordering key", max_length=NAME_LENGTH, default="", blank=True)
    shard = models.PositiveSmallIntegerField(editable=False)
    priority = models.PositiveSmallIntegerField(default=0)
    state = models.CharField(max_length=12, choices=State, default=State.READY)
    body = models.BinaryField()
    headers = ReadableJSONField(default=dict)
    wire = models.TextField("form on the wire", null=True, editable=False)  # noqa: DJ001 - NULL says that the form is ours
    correlation_id = models.CharField(max_length=NAME_LENGTH, default="")
    causation_id = models.CharField(max_length=NAME_LENGTH, default="")
    traceparent = models.CharField(max_length=NAME_LENGTH, default="")
    attempts = models.PositiveIntegerField(default=0)
    last_error = models.TextField(default="")
    created_at = InstantField()
    deliver_at = InstantField(null=True)
    available_at = InstantField("due at")
    expires_at = InstantField(null=True)
    settled_at = InstantField(null=True)
    # The day on which it was settled, counted from 1970-01-01 UTC; LIVE before that.
    day = models.PositiveIntegerField(default=LIVE, db_default=LIVE, editable=False)

    class Meta:
        verbose_name = "outbox message"
        default_permissions = ("view",)
        permissions = (
            ("cancel_outboxmessage", "Can cancel a message that is not published"),
            ("reschedule_outboxmessage", "Can reschedule a message that is not published, or have it sent now"),
            ("restore_outboxmessage", "Can restore a cancelled, expired, dead or retrying message"),
            ("decide_outboxmessage", "Can decide about a prepared message"),
        )
        constraints = (
            # Whoever changes a state by hand is told to change the day as well: it says where the row is kept.
            models.CheckConstraint(
                condition=Q(day=LIVE) & ~Q(state__in=SETTLED) | Q(day__gte=FIRST_DAY, state__in=SETTLED),
                name="outbox_settled_has_day",
            ),
            models.UniqueConstraint(
                fields=["topic", "biz_id"],
                name="outbox_unique_biz_id",
                condition=Q(is_unique=True) & ~Q(state__in=["expired", "cancelled", "rolled_back"]),
            ),
        )
        indexes = (
            # Ready from the start and of no priority: a stream that only grows at its end, so a reader may remember its place.
            models.Index(
                fields=["shard", "id"],
                name="outbox_stream",
                condition=Q(state="ready", priority=0, available_at=models.F("created_at")),
            ),
            # The secondary ready index, all other ready messages: prioritised, once delayed, retried, released.
            models.Index(
                "shard",
                models.F("priority").desc(),
                "id",
                name="outbox_ready_secondary",
                condition=Q(state="ready") & (Q(priority__gt=0) | ~Q(available_at=models.F("created_at"))),
            ),
            models.Index(fields=["available_at", "id"], name="outbox_due", condition=Q(state="scheduled")),
            models.Index(fields=["available_at", "id"], name="outbox_retrying", condition=Q(state="retrying")),
            # What the timing wheel reads, topic by topic, so that a burst of one does not hide the others.
            models.Index(fields=["topic", "available_at", "id"], name="outbox_schedule", condition=Q(state="scheduled")),
            # By state first: what is stuck, and long due, must not lie in the way of the next check.
            models.Index(
                fields=["state", "available_at", "id"],
                name="outbox_undecided",
                condition=Q(state__in=["prepared", "stuck"]),
            ),
            models.Index(
                fields=["key", "id"],
                name="outbox_holding",
                condition=Q(state__in=["retrying", "dead", "paused", "waiting"]) & ~Q(key=""),
            ),
            # Of a paused topic: the oldest messages to try or to resume, and is there one that will be tried again?
            models.Index(fields=["state", "topic", "id"], name="outbox_paused", condition=Q(state__in=["paused", "retrying"])),
            models.Index(fields=["topic", "biz_id"], name="outbox_biz_id"),
            # For SQLite. On PostgreSQL the partitions take its place, and it indexes nothing.
            models.Index(fields=["day"], name="outbox_day", condition=Q(day__gte=FIRST_DAY)),
        )

    def __str__(self) -> str:
        return f"{self.topic} {self.biz_id} ({self.state})"


class ScheduledMessage(OutboxMessage):
    """A message that waits for its time, for the admin's page of them."""

    class Meta:
        proxy = True
        verbose_name = "scheduled message"
        default_permissions = ()


class PreparedMessage(OutboxMessage):
    """A message whose business has not said yet whether it happened, for the admin's page of them."""

    class Meta:
        proxy = True
        verbose_name = "prepared message"
        default_permissions = ()


class PausedTopic(models.Model):
    """A topic that no relay sends messages of, because the broker refuses them or an operator has said so.

    All relays share these rows. Only a relay deletes one, when no message of the topic is paused any more.
    """

    id = models.BigAutoField(primary_key=True)
    topic = models.CharField(max_length=NAME_LENGTH, unique=True)
    paused_by = models.CharField(max_length=NAME_LENGTH, default="")
    """Who; empty when the circuit breaker did."""
    reason = models.TextField("why", default="", blank=True)
    paused_at = models.DateTimeField("since")
    probe_at = models.DateTimeField("next try", null=True)
    """When the next messages are tried; NULL when none are, because a person has paused the topic."""
    pause_seconds = models.FloatField("length of the pause", default=0.0)
    in_trial = models.JSONField("positions that may be sent", default=list)
    is_resuming = models.BooleanField(default=False)

    class Meta:
        verbose_name = "paused topic"
        default_permissions = ("view",)
        permissions = (
            ("pause_pausedtopic", "Can pause a topic"),
            ("resume_pausedtopic", "Can resume a topic"),
        )

    def __str__(self) -> str:
        return self.topic


class TrailEntry(models.Model):
    """One transition of one message: written in the transaction of the transition, and never changed.

    It outlives its message, so it is tied to it by the message id alone.
    """

    id = models.BigAutoField(primary_key=True)
    message_id = models.UUIDField("message id")
    was = models.CharField("from", max_length=12)
    became = models.CharField("to", max_length=12)
    at = InstantField()
    process = models.CharField(max_length=NAME_LENGTH)
    reason = models.TextField(default="")

    class Meta:
        verbose_name = "trail entry"
        verbose_name_plural = "trail"
        default_permissions = ("view",)
        indexes = (
            models.Index(fields=["message_id", "id"], name="outbox_trail_message"),
            models.Index(fields=["at"], name="outbox_trail_at"),
        )

    def __str__(self) -> str:
        return f"{self.message_id}: {self.was} → {self.became}"


class PendingCallback(models.Model):
    """That the project wants to be told what became of a message, and has not been yet. The row goes when it has."""

    id = models.BigAutoField(primary_key=True)
    # By the message id, which finds it wherever it is. No constraint: on PostgreSQL none can refer to a partitioned table
    # without a unique index on all of it. What deletes messages leaves those that have a pending callback.
    message = models.ForeignKey(OutboxMessage, to_field="message_id", on_delete=models.DO_NOTHING, db_constraint=False)
    event = models.CharField(max_length=12)
    settled_at = InstantField("settled")
    reason = models.TextField("why it is dead", default="")
    callback = models.CharField(max_length=NAME_LENGTH)
    attempts = models.PositiveIntegerField(default=0)
    available_at = InstantField("due")
    last_error = models.TextField(default="")

    class Meta:
        verbose_name = "pending callback"
        default_permissions = ("view",)
        permissions = (
            ("run_pendingcallback", "Can have a pending callback called now"),
            ("discard_pendingcallback", "Can discard a pending callback"),
        )
        indexes = (models.Index(fields=["available_at", "id"], name="outbox_callback_due"),)

    def __str__(self) -> str:
        return f"{self.callback} of {self.event}"


class RelayLease(models.Model):
    """Who does what one relay does alone, until when: relaying where the database has one writer (SQLite), and what it has in
    hand; turning the timing wheel."""

    name = models.CharField(primary_key=True, max_length=32)
    token = models.UUIDField()
    holder = models.CharField(max_length=NAME_LENGTH)
    expires_at = models.DateTimeField()
    in_hand = models.JSONField(default=list)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.name} held by {self.holder}"


class RelayHeartbeat(models.Model):
    """One running relay, as it last said of itself. For people only: no promise depends on it."""

    id = models.UUIDField(primary_key=True)
    host = models.CharField(max_length=NAME_LENGTH)
    pid = models.PositiveIntegerField()
    version = models.CharField(max_length=32)
    started_at = models.DateTimeField("started")
    beat_at = models.DateTimeField("last heartbeat")
    last_pass_at = models.DateTimeField("last successful pass", null=True)
    published = models.PositiveBigIntegerField("published since its start", default=0)
    rate = models.FloatField("messages per second", default=0.0)
    waits_for = models.CharField(max_length=NAME_LENGTH, default="", blank=True)

    class Meta:
        verbose_name = "relay"
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"

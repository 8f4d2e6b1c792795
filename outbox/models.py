"""The outbox table: one row per message, its state in one column."""

from django.core.validators import MaxValueValidator
from django.db import models
from django.db.models import Q
from django.db.models.functions import Cast
from django.utils.translation import gettext_lazy as _

from exactly_once.sql.days import FIRST_DAY, LIVE
from exactly_once.sql.fields import NameField, ReadableJSONField, instants
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.identity import new_message_id
from exactly_once.wire.text import NAME_LENGTH
from outbox.states import SETTLED, State, TopicState

SHARDS = 64
"""Number of shards. A row's shard is fixed at insert, so a change of this number would break the order of keys in flight."""

MAX_PRIORITY = 9
_MAX_ATTEMPTS = 10**9

STREAM = Q(state="ready", ready_position=0)
"""Ready messages that have been ready since their insert, and have no priority."""
SECONDARY = Q(state="ready", ready_position__gt=0)
"""All other ready messages: prioritised, once delayed, retried, released."""

IS_AHEAD = Q(deliver_at__gt=DatabaseTime())
"""Its delivery time is in the future."""

CHAINED = ~Q(correlation_id=Cast("message_id", models.CharField()))
"""Messages of a chain but for its first, whose correlation id is its own message id. On SQLite it is true of all of them."""


class OutboxMessage(models.Model):
    """A message, inserted in the transaction of its business change: live until it is settled, history from then on.

    On PostgreSQL the table is partitioned by `day`: one partition for live messages, and one for each day of history, see
    `store.history`. On SQLite it is a plain table.
    """

    id = models.BigAutoField(primary_key=True)
    message_id = models.UUIDField(_("message id"), unique=True, default=new_message_id, editable=False)
    topic = NameField(max_length=NAME_LENGTH)
    biz_id = NameField(_("biz-id"), max_length=NAME_LENGTH)
    is_unique = models.BooleanField(_("unique by topic and biz-id"), default=False, editable=False)
    key = NameField(_("ordering key"), max_length=NAME_LENGTH, default="", blank=True)
    shard = models.PositiveSmallIntegerField(_("shard"), editable=False)
    priority = models.PositiveSmallIntegerField(_("priority"), default=0, validators=[MaxValueValidator(MAX_PRIORITY)])
    state = NameField(max_length=12, choices=State, default=State.READY)
    # 0: without a priority, and never made ready since its insert. Otherwise another number of the sequence of positions, which
    # was drawn when it became ready.
    ready_position = models.BigIntegerField(default=0, db_default=0, editable=False)
    body = models.BinaryField()
    headers = ReadableJSONField(default=dict)
    wire = models.TextField(_("wire format"), null=True, editable=False)  # noqa: DJ001 - NULL is the outbox's own format
    correlation_id = NameField(max_length=NAME_LENGTH, default="")
    causation_id = models.CharField(max_length=NAME_LENGTH, default="")
    traceparent = models.CharField(max_length=NAME_LENGTH, default="")
    attempts = models.PositiveIntegerField(_("attempts"), default=0, validators=[MaxValueValidator(_MAX_ATTEMPTS)])
    last_error = models.TextField(default="")
    # Why it failed, as one word of `relay.passes`; since when it fails so, and when it last did.
    error_class = NameField(max_length=NAME_LENGTH, default="", db_default="")
    failing_since = models.DateTimeField(null=True)
    failed_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField()
    deliver_at = models.DateTimeField(null=True)
    available_at = models.DateTimeField(_("due at"))
    expires_at = models.DateTimeField(null=True)
    settled_at = models.DateTimeField(null=True)
    # The day on which it was settled, in days since 1970-01-01 UTC; LIVE until then.
    day = models.PositiveIntegerField(default=LIVE, db_default=LIVE, editable=False)

    class Meta:
        verbose_name = _("outbox message")
        verbose_name_plural = _("outbox messages")
        default_permissions = ("view",)
        permissions = (
            ("cancel_outboxmessage", "Can cancel a message that is not published"),
            ("reschedule_outboxmessage", "Can reschedule a message that is not published, or publish it now"),
            ("restore_outboxmessage", "Can restore a cancelled, expired, dead or retrying message"),
            ("decide_outboxmessage", "Can decide about a prepared message"),
            ("export_outboxmessage", "Can export dead letters with their content"),
        )
        constraints = (
            instants(
                "outbox_message_instants",
                *("failing_since", "failed_at", "created_at", "deliver_at", "available_at", "expires_at", "settled_at"),
            ),
            # A number beyond its limit must not fail the others of its batch. SQLite stores any text, which is greater.
            models.CheckConstraint(
                condition=Q(shard__lt=SHARDS, priority__lte=MAX_PRIORITY, attempts__lte=_MAX_ATTEMPTS),
                name="outbox_message_numbers",
            ),
            # A state that is changed by hand must match the day, which determines the partition of the row.
            models.CheckConstraint(
                condition=Q(day=LIVE) & ~Q(state__in=SETTLED) | Q(day__gte=FIRST_DAY, state__in=SETTLED),
                name="outbox_settled_has_day",
            ),
        )
        indexes = (
            # It grows only at its end, so a reader can keep a floor.
            models.Index(fields=["shard", "id"], name="outbox_stream", condition=STREAM),
            # With the position at which it became ready, so that a reader skips entries below its floor without their rows.
            models.Index(
                "shard", models.F("priority").desc(), "id", "ready_position", name="outbox_ready_secondary", condition=SECONDARY
            ),
            # Whether an earlier message of a key has become ready that was not read yet.
            models.Index(fields=["key", "id"], name="outbox_made_ready_keys", condition=SECONDARY & ~Q(key="")),
            # It grows at its end, too.
            models.Index(fields=["shard", "ready_position"], name="outbox_made_ready", condition=SECONDARY),
            models.Index(fields=["available_at", "id"], name="outbox_due", condition=Q(state="scheduled")),
            models.Index(fields=["available_at", "id"], name="outbox_retrying", condition=Q(state="retrying")),
            # For the timing wheel, which reads topic by topic, so that a burst of one does not hide the others.
            models.Index(fields=["topic", "available_at", "id"], name="outbox_schedule", condition=Q(state="scheduled")),
            # The state is first: stuck messages, which are long overdue, must not be read before the next due check.
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
            # To count dead and waiting messages, which the other indexes have only with a key.
            models.Index(fields=["state"], name="outbox_dead_or_waiting", condition=Q(state__in=["dead", "waiting"])),
            # For a paused topic: the oldest messages to probe or to resume, and whether one of its messages is retrying.
            models.Index(fields=["state", "topic", "id"], name="outbox_paused", condition=Q(state__in=["paused", "retrying"])),
            models.Index(fields=["topic", "biz_id"], name="outbox_biz_id"),
            models.Index(fields=["correlation_id", "id"], name="outbox_chain", condition=CHAINED),
            models.Index(
                fields=["error_class", "topic", "failing_since"],
                name="outbox_failures",
                condition=Q(state__in=["retrying", "dead"], failing_since__isnull=False),
            ),
            # For SQLite. On PostgreSQL it is empty: the live partition has no such row, and history is partitioned by day.
            models.Index(fields=["day"], name="outbox_day", condition=Q(day__gte=FIRST_DAY)),
        )

    def __str__(self) -> str:
        return f"{self.topic} {self.biz_id} ({self.state})"


class UniqueMessage(models.Model):
    """The name of a message that was published with `unique=True`, see `store.unique`."""

    message_id = models.UUIDField(primary_key=True)
    topic = NameField(max_length=NAME_LENGTH)
    biz_id = NameField(max_length=NAME_LENGTH)

    class Meta:
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["topic", "biz_id"], name="outbox_unique_biz_id"),)

    def __str__(self) -> str:
        return f"{self.topic} {self.biz_id}"


class PausedTopic(models.Model):
    """A topic whose messages are `paused`: an operator has paused it, the broker refuses them, or its rate limits them.

    All relays share these rows. Only a relay deletes a row, when no message of the topic is paused any more.
    """

    id = models.BigAutoField(primary_key=True)
    topic = NameField(_("topic"), max_length=NAME_LENGTH, unique=True)
    mode = models.CharField(max_length=12, choices=TopicState, default=TopicState.PAUSED)
    paused_by = models.CharField(max_length=NAME_LENGTH, default="")
    """The operator who paused it; empty for the circuit breaker."""
    reason = models.TextField(_("why"), default="", blank=True)
    error_class = NameField(max_length=NAME_LENGTH, default="", db_default="")
    """Of a topic that the broker refuses: the outcome of its messages, as they have it themselves."""
    paused_at = models.DateTimeField(_("since"))
    probe_at = models.DateTimeField(_("next probe"), null=True)
    """When the next probes, or the next batch of a resumed or limited topic, are due; NULL while an operator has paused it."""
    pause_seconds = models.FloatField(_("pause in seconds"), default=0.0)
    in_trial = models.JSONField(_("positions made ready last"), default=list)
    allowed_at = models.DateTimeField(null=True)
    """Of a limited topic: when its rate allows the next message."""

    class Meta:
        verbose_name = _("paused topic")
        verbose_name_plural = _("paused topics")
        default_permissions = ("view",)
        constraints = (instants("outbox_topic_instants", "paused_at", "probe_at", "allowed_at"),)
        permissions = (
            ("pause_pausedtopic", "Can pause a topic"),
            ("resume_pausedtopic", "Can resume a topic"),
        )

    def __str__(self) -> str:
        return self.topic


class TrailEntry(models.Model):
    """One transition of one message, inserted in the transaction of the transition and never changed.

    It may be retained longer than its message, so it refers to it only by the message id, without a foreign key.
    """

    id = models.BigAutoField(primary_key=True)
    message_id = models.UUIDField(_("message id"))
    was = models.CharField(_("from"), max_length=12)
    became = models.CharField(_("to"), max_length=12)
    at = models.DateTimeField()
    process = models.CharField(max_length=NAME_LENGTH)
    reason = models.TextField(default="")

    class Meta:
        verbose_name = _("trail entry")
        verbose_name_plural = _("trail")
        default_permissions = ("view",)
        constraints = (instants("outbox_trail_instants", "at"),)
        indexes = (
            models.Index(fields=["message_id", "id"], name="outbox_trail_message"),
            models.Index(fields=["at"], name="outbox_trail_at"),
        )

    def __str__(self) -> str:
        return f"{self.message_id}: {self.was} → {self.became}"


class PendingCallback(models.Model):
    """A callback that is to be called for a settled message. The row is deleted when the callback has returned."""

    id = models.BigAutoField(primary_key=True)
    # Refers to the message id, which is the same in every partition. There is no constraint, because on PostgreSQL a foreign
    # key needs a unique index on the whole partitioned table. Messages with a pending callback are not deleted.
    message = models.ForeignKey(OutboxMessage, to_field="message_id", on_delete=models.DO_NOTHING, db_constraint=False)
    event = models.CharField(max_length=12)
    settled_at = models.DateTimeField(_("settled"))
    reason = models.TextField(_("why it is dead"), default="")
    callback = models.CharField(max_length=NAME_LENGTH)
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    available_at = models.DateTimeField(_("due"))
    last_error = models.TextField(default="")

    class Meta:
        verbose_name = _("pending callback")
        verbose_name_plural = _("pending callbacks")
        default_permissions = ("view",)
        permissions = (
            ("run_pendingcallback", "Can make a pending callback due now"),
            ("discard_pendingcallback", "Can discard a pending callback"),
        )
        constraints = (instants("outbox_callback_instants", "settled_at", "available_at"),)
        indexes = (models.Index(fields=["available_at", "id"], name="outbox_callback_due"),)

    def __str__(self) -> str:
        return f"{self.callback} of {self.event}"

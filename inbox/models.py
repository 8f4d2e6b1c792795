"""The inbox's tables: receipts, which make a message handled once, and messages: open work, and history."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Coalesce
from django.utils.translation import gettext_lazy as _

from exactly_once.sql.days import FIRST_DAY, LIVE
from exactly_once.sql.fields import NameField
from exactly_once.wire.text import NAME_LENGTH
from inbox.states import SETTLED, State

CHAINED = ~Q(correlation_id="") & ~Q(correlation_id=models.F("message_id"))
"""Messages of a chain but for its first, whose correlation id is its own message id."""


class Receipt(models.Model):
    """A message that one handler has accepted. It makes the message handled once, and is stored for `RETENTION`.

    It is inserted with its message, in one statement. It outlives its message, whose history is dropped after
    `KEEP_HISTORY`. A message that leaves no trace is deleted with it.
    """

    id = models.BigAutoField(primary_key=True)
    handler = NameField(max_length=NAME_LENGTH)
    topic = NameField(max_length=NAME_LENGTH)
    biz_id = NameField(_("biz-id"), max_length=NAME_LENGTH)
    message_id = models.CharField(_("message id"), max_length=NAME_LENGTH)
    digest = models.CharField(max_length=64)
    # In the order of the ids, which is how old receipts are found. An operator's retry is an instant of its own.
    received_at = models.DateTimeField()
    retried_at = models.DateTimeField(null=True)

    class Meta:
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["handler", "topic", "biz_id"], name="inbox_once"),)

    def __str__(self) -> str:
        return f"{self.handler}: {self.topic} {self.biz_id}"


class InboxMessage(models.Model):
    """One message in one handler, and its outcome: open until it is settled, history from then on.

    On PostgreSQL the table is partitioned by `day`, as the outbox's: one partition for open messages, and one for each day of
    history, see `exactly_once.sql.partitions`. On SQLite it is a plain table.
    """

    # That of its receipt, so that ids are in the order of arrival.
    id = models.BigIntegerField(primary_key=True)
    numbered_by = Receipt
    handler = NameField(max_length=NAME_LENGTH)
    topic = models.CharField(max_length=NAME_LENGTH)
    biz_id = models.CharField(_("biz-id"), max_length=NAME_LENGTH)
    message_id = NameField(_("message id"), max_length=NAME_LENGTH)
    key = NameField(_("ordering key"), max_length=NAME_LENGTH, default="")
    # Its position in the order of its key is its id, or `place`.
    ordered = models.BooleanField(default=False, db_default=False)
    # The dead message whose payload an operator has corrected here, and its place in the order of its key. Its history may be
    # dropped before that of this one, so the reference has no constraint. A full index would cost an entry for every message.
    replaces = models.ForeignKey(
        "self", null=True, on_delete=models.DO_NOTHING, db_constraint=False, db_index=False, related_name="replacements"
    )
    place = models.BigIntegerField(null=True)
    state = NameField(max_length=12, choices=State)
    attempts = models.PositiveIntegerField(_("attempts"), default=0, db_default=0)
    # The fencing token: every claim, lease and retry of this message increments it, and nothing resets it. So a process that
    # was frozen after its claim, or whose lease has ended, begins and settles nothing.
    fence = models.PositiveBigIntegerField(default=0, db_default=0)
    # While it runs under a lease: its process has been asked to stop, so a run that never ends did not end the process.
    stopping = models.BooleanField(default=False, db_default=False)
    content_type = models.CharField(_("content type"), max_length=NAME_LENGTH)
    body = models.BinaryField()
    digest = models.CharField(max_length=64)
    headers = models.JSONField(default=dict)
    source = models.CharField(max_length=NAME_LENGTH, default="")
    correlation_id = NameField(max_length=NAME_LENGTH, default="")
    causation_id = models.CharField(max_length=NAME_LENGTH, default="")
    traceparent = models.CharField(max_length=NAME_LENGTH, default="")
    # Deliveries after the first. Of these: redelivered by the broker, resent by a relay, replayed by an operator; the others
    # were published again with the same biz-id. `conflicts` counts those with different content.
    duplicates = models.PositiveIntegerField(default=0, db_default=0)
    redeliveries = models.PositiveIntegerField(default=0, db_default=0)
    resends = models.PositiveIntegerField(default=0, db_default=0)
    replays = models.PositiveIntegerField(default=0, db_default=0)
    conflicts = models.PositiveIntegerField(default=0, db_default=0)
    # The latest duplicate with different content, for comparison.
    conflicting_id = models.CharField(_("conflicting message id"), max_length=NAME_LENGTH, default="", db_default="")
    conflicting_body = models.BinaryField(null=True)
    conflicting_at = models.DateTimeField(null=True)
    # Its other columns, see `rows.attributes_of`; NULL once an operator has run it as its own message.
    conflicting_attributes = models.JSONField(null=True)
    # Refused by the maximum message age: only an operator's explicit override runs it.
    quarantined = models.BooleanField(default=False, db_default=False)
    last_error = models.TextField(default="", db_default="")
    # What failed and where, see `exactly_once.failures`; since when it fails so, and when it last did. A deferred message has
    # a class, but does not fail. The latest failed attempts, each with its traceback, stay when the message is done.
    error_class = NameField(max_length=NAME_LENGTH, default="", db_default="")
    error_place = NameField(max_length=NAME_LENGTH, default="", db_default="")
    failing_since = models.DateTimeField(null=True)
    failed_at = models.DateTimeField(null=True)
    failures = models.JSONField(null=True)
    traceback = models.TextField(default="", db_default="")
    # The handler's return value, if Celery may request it again.
    result = models.JSONField(null=True)
    created_at = models.DateTimeField(null=True)
    received_at = models.DateTimeField()
    # NULL while it waits for an earlier message of its key, and in settled states. While it runs under a lease: when that ends.
    next_attempt_at = models.DateTimeField(null=True)
    settled_at = models.DateTimeField(null=True)
    # The day on which it was settled, or had its latest conflict since, in days since 1970-01-01 UTC; LIVE until it is settled.
    day = models.PositiveIntegerField(default=LIVE, db_default=LIVE, editable=False)

    class Meta:
        verbose_name = _("inbox message")
        verbose_name_plural = _("inbox messages")
        default_permissions = ("view",)
        permissions = (
            ("retry_inboxmessage", "Can retry a dead or retrying message"),
            ("skip_inboxmessage", "Can skip a message that is not done"),
            ("edit_inboxmessage", "Can correct the payload of a dead message and run it"),
            ("unredacted_inboxmessage", "Can see a payload unredacted to correct it"),
            ("override_inboxmessage", "Can run a message that the maximum message age holds back"),
            ("run_conflicting_inboxmessage", "Can run a message with the biz-id of an earlier one and other content"),
            ("dry_run_inboxmessage", "Can run a handler without its effect, in the web process"),
            ("export_inboxmessage", "Can export dead letters with their content"),
        )
        constraints = (
            # A state that is changed by hand must match the day, which determines the partition of the row.
            models.CheckConstraint(
                condition=Q(day=LIVE) & ~Q(state__in=SETTLED) | Q(day__gte=FIRST_DAY, state__in=SETTLED),
                name="inbox_settled_has_day",
            ),
        )
        indexes = (
            models.Index(
                # Handler first: a poll reads no entries of handlers that it may not run, see `store.due`.
                fields=["handler", "next_attempt_at"],
                name="inbox_due",
                condition=Q(state__in=["received", "retrying", "running"]),
            ),
            models.Index(
                # Without the handler, or the planner would search all open messages of a handler for the head of a key.
                fields=["state"],
                name="inbox_open",
                condition=Q(state__in=["received", "retrying", "waiting", "running", "dead"]),
            ),
            # For SQLite. On PostgreSQL it is empty: the live partition has no such row, and history is partitioned by day.
            models.Index(fields=["day"], name="inbox_day", condition=Q(day__gte=FIRST_DAY)),
            models.Index(fields=["replaces"], name="inbox_replaces", condition=Q(replaces__isnull=False)),
            # The rare settled states, for searches in the admin.
            models.Index(fields=["state", "id"], name="inbox_unhandled", condition=Q(state__in=["skipped", "shed"])),
            models.Index(fields=["id"], name="inbox_duplicates", condition=Q(duplicates__gt=0)),
            models.Index(fields=["message_id"], name="inbox_message_id"),
            models.Index(fields=["handler", "id"], name="inbox_handler"),
            models.Index(fields=["correlation_id", "id"], name="inbox_chain", condition=CHAINED),
            models.Index(
                "handler",
                "key",
                Coalesce("place", "id", output_field=models.BigIntegerField()),
                name="inbox_order",
                # Not as in `inbox_open`: the planner would read all of that index for the head of a key, if the statistics are
                # from a time when little was open.
                condition=Q(ordered=True) & ~Q(state__in=["done", "skipped", "shed"]),
            ),
            models.Index(fields=["handler", "id"], name="inbox_conflicts", condition=Q(conflicts__gt=0)),
            models.Index(
                fields=["error_class", "error_place", "failing_since"],
                name="inbox_failures",
                condition=Q(state__in=["retrying", "dead"], failing_since__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.handler}: {self.topic} {self.biz_id} ({self.state})"


class Step(models.Model):
    """The result of a named step of a message, so that a retry does not run it again."""

    # Deleted after its message. A partitioned table has no constraint that this could refer to.
    message = models.ForeignKey(
        InboxMessage, on_delete=models.DO_NOTHING, db_constraint=False, db_index=False, related_name="steps"
    )
    name = NameField(max_length=NAME_LENGTH)
    result = models.JSONField(null=True)
    taken_at = models.DateTimeField()

    class Meta:
        default_permissions = ("view",)
        constraints = (models.UniqueConstraint(fields=["message", "name"], name="inbox_step_once"),)

    def __str__(self) -> str:
        return self.name


class TrailEntry(models.Model):
    """One transition of one message in one handler: written in the transaction of the transition, and never changed.

    It outlives its message, so it has no foreign key to it.
    """

    id = models.BigAutoField(primary_key=True)
    message_id = NameField(_("message id"), max_length=NAME_LENGTH)
    handler = models.CharField(max_length=NAME_LENGTH)
    was = models.CharField(_("from"), max_length=12)
    became = models.CharField(_("to"), max_length=12)
    at = models.DateTimeField()
    process = models.CharField(max_length=NAME_LENGTH)
    reason = models.TextField(default="")

    class Meta:
        verbose_name = _("trail entry")
        verbose_name_plural = _("trail")
        default_permissions = ("view",)
        indexes = (
            models.Index(fields=["message_id", "id"], name="inbox_trail_message"),
            models.Index(fields=["at"], name="inbox_trail_at"),
        )

    def __str__(self) -> str:
        return f"{self.handler}, {self.message_id}: {self.was} → {self.became}"


class TokenBucket(models.Model):
    """The token bucket of a handler's rate limit, shared by all its processes."""

    handler = NameField(max_length=NAME_LENGTH, primary_key=True)
    tokens = models.FloatField()
    filled_at = models.DateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.handler


class LeaseMemory(models.Model):
    """Since when a lease store outside this database has complete data. Such a store may lose data."""

    store = NameField(max_length=NAME_LENGTH, primary_key=True)
    incarnation = models.CharField(max_length=64)
    remembers_since = models.DateTimeField(null=True)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.store


class PausedHandler(models.Model):
    """A handler that no process runs until an operator resumes it; all processes read these rows.

    Its messages stay in the broker's queue; those stored here stay due. See `inbox.operators.handler_pauses`.
    """

    id = models.BigAutoField(primary_key=True)
    handler = NameField(max_length=NAME_LENGTH, unique=True)
    paused_by = models.CharField(_("by"), max_length=NAME_LENGTH)
    reason = models.TextField(_("why"), default="", blank=True)
    paused_at = models.DateTimeField(_("since"))

    # For mypy, whose Django plugin does not add it to a model that the package's public names lead to.
    objects: ClassVar[models.Manager[PausedHandler]]

    class Meta:
        verbose_name = _("paused handler")
        verbose_name_plural = _("paused handlers")
        default_permissions = ("view",)
        permissions = (
            ("pause_pausedhandler", "Can pause a handler"),
            ("resume_pausedhandler", "Can resume a handler"),
        )

    def __str__(self) -> str:
        return self.handler


class KeptHandler(models.Model):
    """How long a service keeps receipts and history of one handler; see `inbox.store.handler_rows`."""

    id = models.BigAutoField(primary_key=True)
    handler = NameField(max_length=NAME_LENGTH)
    retention = models.DurationField()
    history = models.DurationField()
    confirmed_at = models.DateTimeField()

    class Meta:
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["handler", "retention", "history"], name="inbox_kept"),)

    def __str__(self) -> str:
        return self.handler


class HandlerStart(models.Model):
    """A new handler that wants the messages of before, and how far a relay has handed them over.

    Until that is complete, nothing is received from its queue. See `inbox.local` and `outbox.relay.starting`.
    """

    id = models.BigAutoField(primary_key=True)
    handler = NameField(max_length=NAME_LENGTH, unique=True)
    # It wants what was published since then; NULL for all there is.
    since = models.DateTimeField(null=True)
    asked_at = models.DateTimeField()
    # The present round: what it reads, since when it does, and the last position that was handed over.
    read_from = models.DateTimeField(null=True)
    round_at = models.DateTimeField(null=True)
    position = models.BigIntegerField(default=0)
    handed_over = models.PositiveBigIntegerField(default=0)
    complete_at = models.DateTimeField(null=True)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.handler

"""What both halves store for operators: processes, statistics, alerts, the audit log, operations, notes; and leases.

A table is in each database that has messages; its column `app` says which half a row is about.
"""

from typing import Any

from django.db import models
from django.db.models import Q
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from exactly_once.process.loop import Mode, Request
from exactly_once.sql.fields import NameField
from exactly_once.wire.text import NAME_LENGTH


class Process(models.Model):
    """The last heartbeat of one process, and the operator's last request to it. No guarantee depends on it."""

    id = models.UUIDField(primary_key=True)
    app = models.CharField(_("app"), max_length=32)
    """The package that it works for: "outbox" for a relay, "inbox" for a consumer."""
    host = models.CharField(max_length=NAME_LENGTH)
    pid = models.PositiveIntegerField()
    version = models.CharField(max_length=32)
    started_at = models.DateTimeField(_("started"))
    beat_at = models.DateTimeField(_("last heartbeat"))
    last_pass_at = models.DateTimeField(_("last successful pass"), null=True)
    """Of a relay."""
    # What it waits for, for people; and is that the broker?
    waits_for = models.CharField(max_length=NAME_LENGTH, default="", blank=True)
    without_broker = models.BooleanField(default=False, db_default=False)
    rate = models.FloatField(_("messages per second"), default=0.0, db_default=0.0)
    memory_bytes = models.PositiveBigIntegerField(_("resident memory in bytes"), null=True)
    # The time of the last heartbeat's statement and its commit, as the process saw it.
    database_ms = models.FloatField(_("database round trip in ms"), null=True)
    broker_ms = models.FloatField(_("broker round trip in ms"), null=True)
    running = models.JSONField(default=list)
    """What its threads run now, see `process.work`."""
    facts = models.JSONField(default=dict)
    """What only its kind reports. A relay: `published` since its
    start, and the `shards` that it tries in one pass. A consumer: the names of its `handlers` on this database; deliveries
    `received`, and stored messages that it `ran`, since its start; by handler, how many `threads` may run it, and how many
    messages are `queued` at the broker; what single handlers wait for, as `waits`.
    """
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
        verbose_name = _("process")
        verbose_name_plural = _("processes")
        default_permissions = ("view",)
        permissions = (
            ("pause_process", "Can pause a process"),
            ("resume_process", "Can resume a process"),
            ("drain_process", "Can drain a process"),
            ("stop_process", "Can stop a process"),
        )

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"

    @property
    def waits(self) -> list[str]:
        """What it or one of its handlers waits for, for people."""
        return [*filter(None, [self.waits_for]), *self.facts.get("waits", ())]


class Minute(models.Model):
    """What one process counted in one minute of one subject, a topic or a handler, or of all; see `upkeep.minutes`.

    `counts` has numbers by name, `times` histograms by name, see `telemetry.statistics.Counted`.

    - In the outbox: `published`, `retried`, `dead`, `expired`; `to_broker`, from the due time of a message until the broker's
      confirm is stored.
    - In the inbox: `handled`, `failed`, `deferred` (attempts that ended with RetryLater), `dead`, `redeliveries`, `resends`,
      `replays`, `repeats` (duplicates that were published again under the same biz-id); `to_inbox`, from the due time in a
      message's header until it was received; `to_effect`, from then until its effect was committed.
    """

    id = models.BigAutoField(primary_key=True)
    app = NameField(max_length=32)
    """The package that it is about: "outbox" or "inbox"."""
    minute = models.DateTimeField()
    process = models.CharField(max_length=NAME_LENGTH)
    subject = NameField(max_length=NAME_LENGTH)
    counts = models.JSONField(default=dict)
    times = models.JSONField(default=dict)

    class Meta:
        verbose_name = "statistics of a minute"
        verbose_name_plural = "statistics"
        default_permissions = ()
        indexes = (
            models.Index(fields=["app", "subject", "minute"], name="exactly_once_minute_subject"),
            models.Index(fields=["minute"], name="exactly_once_minute_at"),
        )

    def __str__(self) -> str:
        return f"{self.subject} in {self.minute:%Y-%m-%d %H:%M}"


class AuditEntry(models.Model):
    """One action of an operator on one object, inserted in the transaction of the action.

    Append-only: a row is never changed, and only deleted after its retention.
    """

    id = models.BigAutoField(primary_key=True)
    app = models.CharField(_("app"), max_length=32)
    """The package that it is about: "outbox" or "inbox"."""
    at = models.DateTimeField(_("time"))
    actor = models.CharField(_("who"), max_length=NAME_LENGTH)
    """The user name in the admin, the operating system's user of a command, or the client of the HTTP API."""
    place = models.CharField(_("where"), max_length=NAME_LENGTH)
    """"admin", the name of the command, or "HTTP API"."""
    address = models.CharField(_("address"), max_length=NAME_LENGTH)
    """The IP address of the request, or the host of the command."""
    action = models.CharField(_("action"), max_length=64)
    kind = NameField(_("kind"), max_length=64)
    """What was acted on: "message", "topic", "handler", "process" and so on."""
    object_id = NameField(_("object"), max_length=NAME_LENGTH, default="", blank=True)
    name = models.TextField(_("name"), default="", blank=True)
    parameters = models.JSONField(_("parameters"), default=dict)

    class Meta:
        verbose_name = _("audit log entry")
        verbose_name_plural = _("audit log entries")
        default_permissions = ("view",)
        permissions = (("export_auditentry", "Can export the audit log"),)
        indexes = (
            models.Index(fields=["at"], name="exactly_once_audit_at"),
            models.Index(fields=["kind", "object_id"], name="exactly_once_audit_object"),
        )

    def __str__(self) -> str:
        return f"{self.actor}: {self.action} {self.kind} {self.name}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Insert the row.

        Raises:
            TypeError: it is stored already.
        """
        if not self._state.adding:
            raise TypeError("An entry of the audit log is never changed.")
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError: only the retention deletes entries, many at a time."""
        raise TypeError("An entry of the audit log is not deleted before its retention ends.")


class Alert(models.Model):
    """One condition on one object, from the first evaluation that met it until it is cleared.

    It is `pending` until enough evaluations in a row have met it. It is reported when it is raised and when it is cleared.
    """

    class State(models.TextChoices):
        PENDING = "pending", _("pending")
        RAISED = "raised", _("raised")
        CLEARED = "cleared", _("cleared")

    id = models.BigAutoField(primary_key=True)
    app = NameField(_("app"), max_length=32)
    """The package that it is about: "outbox" or "inbox"."""
    condition = NameField(_("condition"), max_length=64)
    object = NameField(_("object"), max_length=NAME_LENGTH, default="", blank=True)
    """A topic or a handler; empty for a condition of the whole database."""
    summary = models.TextField(_("summary"))
    state = models.CharField(_("state"), max_length=12, choices=State, default=State.PENDING)
    # Evaluations in a row that met the condition; while it is raised, those that did not.
    met = models.PositiveIntegerField(default=0)
    unmet = models.PositiveIntegerField(default=0)
    first_seen_at = models.DateTimeField(_("first seen"))
    seen_at = models.DateTimeField(_("last seen"))
    raised_at = models.DateTimeField(_("raised"), null=True)
    acknowledged_by = models.CharField(_("acknowledged by"), max_length=NAME_LENGTH, default="", blank=True)
    acknowledged_at = models.DateTimeField(_("acknowledged"), null=True)
    cleared_at = models.DateTimeField(_("cleared"), null=True)
    # What is still to be sent: a list of [event, channel]. It is sent at least once, and tried again with backoff.
    unsent = models.JSONField(default=list)
    send_attempts = models.PositiveIntegerField(default=0)
    send_at = models.DateTimeField(null=True)
    send_error = models.TextField(_("last error of a delivery"), default="", blank=True)

    class Meta:
        verbose_name = _("alert")
        verbose_name_plural = _("alerts")
        default_permissions = ("view",)
        permissions = (("acknowledge_alert", "Can acknowledge an alert"),)
        constraints = (
            models.UniqueConstraint(
                fields=["app", "condition", "object"], name="exactly_once_alert_open", condition=Q(cleared_at=None)
            ),
        )
        indexes = (models.Index(fields=["send_at"], name="exactly_once_alert_unsent", condition=Q(send_at__isnull=False)),)

    def __str__(self) -> str:
        return f"{self.condition} {self.object}".strip()


class Lease(models.Model):
    """The right of one process to do some work, and when it was done last; see `upkeep.loop_leases`.

    It was taken in the middle between its two instants.
    """

    name = NameField(primary_key=True, max_length=64)
    token = models.UUIDField()
    holder = models.CharField(max_length=NAME_LENGTH)
    valid_from = models.DateTimeField()
    expires_at = models.DateTimeField()
    done_at = models.DateTimeField(null=True)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.name} held by {self.holder}"


class OperationState(models.TextChoices):
    """The state of an operation. A previewed one is not executed until its user has confirmed it. The last three are final."""

    PREVIEWED = "previewed", _("Previewed")
    PLANNED = "planned", _("Planned")
    RUNNING = "running", _("Running")
    STOPPED = "stopped", _("Stopped")
    FINISHED = "finished", _("Finished")
    CANCELLED = "cancelled", _("Cancelled")


OPEN = (OperationState.PLANNED, OperationState.RUNNING)


class Operation(models.Model):
    """One action on many messages, with its progress and its outcome."""

    id = models.BigAutoField(primary_key=True)
    app = NameField(_("app"), max_length=32)
    """The package that it is about: "outbox" or "inbox"."""
    action = models.CharField(_("action"), max_length=32)
    # What was selected, for people, and the states from which a message is changed.
    selection = models.CharField(_("selection"), max_length=1000)
    sources = models.JSONField(default=list)
    given = models.JSONField(_("parameters"), default=dict)
    reason = models.CharField(_("reason"), max_length=500, default="", blank=True)
    requested_by = models.CharField(_("requested by"), max_length=NAME_LENGTH)
    # The client of the HTTP API that has planned it; "" if a user or a command has.
    client = models.CharField(max_length=NAME_LENGTH, default="")
    # What that user or client needs until the operation has ended; "" if a command planned it.
    permission = models.CharField(max_length=NAME_LENGTH, default="")
    # Messages per second at most; NULL for no limit.
    rate = models.PositiveIntegerField(_("messages per second"), null=True)
    state = models.CharField(_("state"), max_length=12, choices=OperationState, default=OperationState.PLANNED)
    cancelled_by = models.CharField(max_length=NAME_LENGTH, default="")
    stopped_because = models.TextField(default="")
    total = models.PositiveIntegerField(default=0)
    done = models.PositiveIntegerField(default=0)
    refused = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    # Numbers of unchanged messages by reason, and the first of them one by one: row, name, reason.
    reasons = models.JSONField(default=dict)
    unchanged = models.JSONField(default=list)
    # A canary runs in waves, each ten times as large as the one before. The rows of the present wave, each with what it failed
    # with before; since when they are awaited; and how many of all waves have succeeded and failed since.
    is_canary = models.BooleanField(default=False)
    wave = models.PositiveIntegerField(default=0)
    wave_rows = models.JSONField(default=list)
    wave_at = models.DateTimeField(null=True)
    succeeded = models.PositiveIntegerField(default=0)
    failed_again = models.PositiveIntegerField(default=0)
    # The process that executes it.
    token = models.UUIDField(null=True)
    holder = models.CharField(max_length=NAME_LENGTH, default="")
    leased_until = models.DateTimeField(null=True)
    planned_at = models.DateTimeField(_("planned"))
    started_at = models.DateTimeField(_("started"), null=True)
    ended_at = models.DateTimeField(_("ended"), null=True)

    class Meta:
        default_permissions = ()
        verbose_name = _("operation")
        verbose_name_plural = _("operations")
        indexes = (models.Index(fields=["app"], name="exactly_once_operation_open", condition=Q(state__in=OPEN)),)

    def __str__(self) -> str:
        return f"{self.action}: {self.selection}"

    @property
    def processed(self) -> int:
        return self.done + self.refused + self.failed

    @property
    def is_open(self) -> bool:
        return self.state in OPEN


class OperationPart(models.Model):
    """Some rows of an operation that are not processed yet."""

    id = models.BigAutoField(primary_key=True)
    operation = models.ForeignKey(Operation, on_delete=models.CASCADE, related_name="parts")
    rows = models.JSONField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{len(self.rows)} rows"


class FailureNote(models.Model):
    """What operators write about the messages that fail for one reason.

    `place` is where they fail: a place in the code, or a topic.
    """

    id = models.BigAutoField(primary_key=True)
    app = NameField(_("app"), max_length=32)
    """The package that it is about: "outbox" or "inbox"."""
    error_class = NameField(max_length=NAME_LENGTH)
    place = NameField(max_length=NAME_LENGTH)
    note = models.TextField()
    written_by = models.CharField(max_length=NAME_LENGTH)
    written_at = models.DateTimeField()

    class Meta:
        default_permissions = ()
        permissions = (("note_failurenote", "Can write notes on failure groups"),)
        constraints = (models.UniqueConstraint(fields=["app", "error_class", "place"], name="exactly_once_failure_note_once"),)
        verbose_name = _("failure group")
        verbose_name_plural = _("failure groups")

    def __str__(self) -> str:
        return self.error_class


class _Page:
    """The options of a page of its own in the admin. It has no rows of its own."""

    proxy = True
    default_permissions = ("view",)


class Overview(AuditEntry):
    """The overview."""

    class Meta(_Page):
        verbose_name = _("overview")
        # The admin sorts the pages of an app by name, and HTML ignores the space.
        verbose_name_plural = format_lazy(" {}", _("Overview"))


class DatabaseHealth(AuditEntry):
    """The page of what pins the vacuum horizon."""

    class Meta(_Page):
        verbose_name = verbose_name_plural = _("database health")


class Flow(AuditEntry):
    """The page of a chain of messages."""

    class Meta(_Page):
        verbose_name = verbose_name_plural = _("flow")


class Busy(AuditEntry):
    """The page of what runs now."""

    class Meta(_Page):
        verbose_name = _("what runs now")
        verbose_name_plural = _("busy")


class TopicsAndHandlers(AuditEntry):
    """The page of topics and handlers."""

    class Meta(_Page):
        verbose_name = verbose_name_plural = _("topics and handlers")

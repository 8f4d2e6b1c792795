"""The columns of a bulk operation of an operator, and of its frozen selection. Each app has its own tables.

The selection is a list of rows, fixed when the operation is planned: what matches later does not belong to it, and what has
changed since is refused by the guard of its transition.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from outbox.kernel.text import NAME_LENGTH


class OperationState(models.TextChoices):
    """The state of an operation. All but the first two are final."""

    PLANNED = "planned", _("Planned")
    RUNNING = "running", _("Running")
    STOPPED = "stopped", _("Stopped")
    FINISHED = "finished", _("Finished")
    CANCELLED = "cancelled", _("Cancelled")


OPEN = (OperationState.PLANNED, OperationState.RUNNING)


class AbstractOperation(models.Model):
    """One action on many messages, with its progress and its outcome."""

    id = models.BigAutoField(primary_key=True)
    action = models.CharField(_("action"), max_length=32)
    # What was selected, for people, and the states from which a message is changed.
    selection = models.CharField(_("selection"), max_length=1000)
    sources = models.JSONField(default=list)
    given = models.JSONField(_("parameters"), default=dict)
    reason = models.CharField(_("reason"), max_length=500, default="", blank=True)
    requested_by = models.CharField(_("requested by"), max_length=NAME_LENGTH)
    # What that user needs until the operation has ended; "" if a command planned it.
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
        abstract = True
        default_permissions = ()
        verbose_name = _("operation")
        verbose_name_plural = _("operations")

    def __str__(self) -> str:
        return f"{self.action}: {self.selection}"

    @property
    def processed(self) -> int:
        return self.done + self.refused + self.failed

    @property
    def is_open(self) -> bool:
        return self.state in OPEN


class AbstractOperationPart(models.Model):
    """Some rows of an operation that are not processed yet. A subclass has the foreign key `operation`."""

    id = models.BigAutoField(primary_key=True)
    rows = models.JSONField()

    class Meta:
        abstract = True
        default_permissions = ()

    def __str__(self) -> str:
        return f"{len(self.rows)} rows"


class AbstractFailureNote(models.Model):
    """What operators write about the messages that fail for one reason.

    `place` is where they fail: a place in the code, or a topic.
    """

    id = models.BigAutoField(primary_key=True)
    error_class = models.CharField(max_length=NAME_LENGTH)
    place = models.CharField(max_length=NAME_LENGTH)
    note = models.TextField()
    written_by = models.CharField(max_length=NAME_LENGTH)
    written_at = models.DateTimeField()

    class Meta:
        abstract = True
        default_permissions = ()
        verbose_name = _("failure group")
        verbose_name_plural = _("failure groups")

    def __str__(self) -> str:
        return self.error_class

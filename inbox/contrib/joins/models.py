"""The tables of joins: one row per run, and one per message that has come for it.

The state of a run is that of its inbox row; nothing here repeats it.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from exactly_once.packages import require_app
from exactly_once.sql.fields import NameField
from exactly_once.wire.text import NAME_LENGTH
from inbox.models import InboxMessage

require_app("inbox.contrib.joins")


class Run(models.Model):
    """One run of one join."""

    id = models.BigAutoField(primary_key=True)
    handler = NameField(max_length=NAME_LENGTH)
    run_id = NameField(_("run id"), max_length=NAME_LENGTH)
    # Deleted after its row.
    row = models.OneToOneField(InboxMessage, on_delete=models.DO_NOTHING, db_constraint=False, related_name="+")
    opened_at = models.DateTimeField()
    deadline_at = models.DateTimeField(_("deadline"))
    # The operator who has started the run without the missing messages.
    started_by = models.CharField(max_length=NAME_LENGTH, default="", db_default="")

    # For mypy, whose Django plugin does not add it to a model that the package's public names lead to.
    objects: ClassVar[models.Manager[Run]]

    class Meta:
        verbose_name = _("run of a join")
        verbose_name_plural = _("runs of joins")
        default_permissions = ("view",)
        permissions = (
            ("complete_run", "Can enter the missing messages of a run"),
            ("extend_run", "Can extend the deadline of a run"),
            ("start_run", "Can start a run without the missing messages"),
        )
        constraints = (models.UniqueConstraint(fields=["handler", "run_id"], name="inbox_joins_run_once"),)

    def __str__(self) -> str:
        return f"{self.handler}: {self.run_id}"


class Part(models.Model):
    """A message that has come for a run; at most one of each topic."""

    id = models.BigAutoField(primary_key=True)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="parts", db_index=False)
    topic = NameField(max_length=NAME_LENGTH)
    message_id = models.CharField(_("message id"), max_length=NAME_LENGTH)
    key = models.CharField(_("ordering key"), max_length=NAME_LENGTH, default="")
    # The payload as JSON.
    body = models.BinaryField()
    headers = models.JSONField(default=dict)
    correlation_id = models.CharField(max_length=NAME_LENGTH, default="")
    causation_id = models.CharField(max_length=NAME_LENGTH, default="")
    created_at = models.DateTimeField(null=True)
    stored_at = models.DateTimeField()
    # The operator who has entered it in place of the missing message.
    entered_by = models.CharField(max_length=NAME_LENGTH, default="", db_default="")

    objects: ClassVar[models.Manager[Part]]

    class Meta:
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["run", "topic"], name="inbox_joins_part_once"),)

    def __str__(self) -> str:
        return f"{self.topic} {self.message_id}"

"""The table of schedules: how far each of them is, and whether it is paused. What a schedule does is in the code."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from exactly_once.packages import require_app
from exactly_once.sql.fields import NameField
from exactly_once.wire.text import NAME_LENGTH

require_app("outbox.contrib.recurring")


class Schedule(models.Model):
    """A schedule that a relay has seen."""

    id = models.BigAutoField(primary_key=True)
    name = NameField(max_length=NAME_LENGTH, unique=True)
    # The expression of the relay that worked on it last; "" before the first.
    recurrence = models.TextField(default="", db_default="")
    # The last tick that was published, or the later instant from which ticks count.
    position = models.DateTimeField()
    # When a relay works on it: at the next tick, or again after a failure. None: there is no further tick.
    due_at = models.DateTimeField(null=True)
    paused_at = models.DateTimeField(null=True)
    failures = models.PositiveIntegerField(default=0, db_default=0)
    error = models.TextField(default="", db_default="")

    # For mypy, whose Django plugin does not add it to a model that the package's public names lead to.
    objects: ClassVar[models.Manager[Schedule]]

    class Meta:
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        default_permissions = ("view",)
        permissions = (
            ("pause_schedule", "Can pause and resume a schedule"),
            ("run_schedule", "Can run a schedule now"),
        )

    def __str__(self) -> str:
        return self.name

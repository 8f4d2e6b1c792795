"""The columns of the alerts of both apps, and of the lease under which one process evaluates them; see `console.alerts`."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from outbox.kernel.text import NAME_LENGTH


class AlertRecord(models.Model):
    """One condition on one object, from the first evaluation that met it until it is cleared.

    It is `pending` until enough evaluations in a row have met it. It is reported when it is raised and when it is cleared.
    """

    class State(models.TextChoices):
        PENDING = "pending", _("pending")
        RAISED = "raised", _("raised")
        CLEARED = "cleared", _("cleared")

    id = models.BigAutoField(primary_key=True)
    condition = models.CharField(_("condition"), max_length=64)
    object = models.CharField(_("object"), max_length=NAME_LENGTH, default="", blank=True)
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
        abstract = True

    def __str__(self) -> str:
        return f"{self.condition} {self.object}".strip()


class AlertLeaseRecord(models.Model):
    """The right of one process to evaluate the alerts, and when that was done last; or to do the housekeeping."""

    name = models.CharField(primary_key=True, max_length=32)
    token = models.UUIDField()
    holder = models.CharField(max_length=NAME_LENGTH)
    expires_at = models.DateTimeField()
    evaluated_at = models.DateTimeField(null=True)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.name} held by {self.holder}"

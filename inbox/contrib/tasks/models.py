"""The table of results: one row per task that has ended. That of a task which has not is read from its message."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from exactly_once.packages import require_app
from exactly_once.sql.fields import NameField
from exactly_once.wire.text import NAME_LENGTH

require_app("inbox.contrib.tasks")


class Status(models.TextChoices):
    """How a task has ended, in the words of `django.tasks`."""

    SUCCESSFUL = "SUCCESSFUL", _("Successful")
    FAILED = "FAILED", _("Failed")


class Result(models.Model):
    """The result of a task, written in the transaction of its effect; or, after its death, by the handler of dead tasks."""

    id = models.BigAutoField(primary_key=True)
    # That of its message, which the inbox keeps for another period.
    message_id = NameField(_("message id"), max_length=NAME_LENGTH, unique=True)
    queue = NameField(max_length=NAME_LENGTH)
    task = models.TextField(_("function"))
    # What was published, as JSON: with the arguments, the alias of the backend and `run_after`.
    body = models.BinaryField()
    key = models.CharField(_("ordering key"), max_length=NAME_LENGTH, default="")
    leased = models.BooleanField(default=False)
    status = NameField(_("status"), max_length=12, choices=Status)
    return_value = models.JSONField(_("return value"), null=True)
    errors = models.JSONField(default=list)
    worker_ids = models.JSONField(_("attempts by"), default=list)
    enqueued_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    last_attempted_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField()
    expires_at = models.DateTimeField()

    objects: ClassVar[models.Manager[Result]]

    class Meta:
        verbose_name = _("result of a task")
        verbose_name_plural = _("results of tasks")
        default_permissions = ("view",)
        permissions = (("retry_result", "Can retry a failed task"), ("enqueue_result", "Can enqueue a task again"))
        indexes = (
            models.Index(fields=["finished_at"], name="inbox_tasks_finished"),
            models.Index(fields=["expires_at"], name="inbox_tasks_expires"),
        )

    def __str__(self) -> str:
        return f"{self.task} ({self.status})"

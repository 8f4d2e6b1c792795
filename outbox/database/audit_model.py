"""The columns of the audit log of both apps: what operators have done, in the admin and with commands."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from outbox.kernel.text import NAME_LENGTH


class AuditRecord(models.Model):
    """One action of an operator on one object, inserted in the transaction of the action.

    Append-only: a row is never changed, and only deleted after its retention.
    """

    id = models.BigAutoField(primary_key=True)
    at = models.DateTimeField(_("time"))
    actor = models.CharField(_("who"), max_length=NAME_LENGTH)
    """The user name in the admin, or the operating system's user of a command."""
    place = models.CharField(_("where"), max_length=NAME_LENGTH)
    """"admin", or the name of the command."""
    address = models.CharField(_("address"), max_length=NAME_LENGTH)
    """The IP address of the request, or the host of the command."""
    action = models.CharField(_("action"), max_length=64)
    kind = models.CharField(_("kind"), max_length=64)
    """What was acted on: "message", "topic", "handler", "process" and so on."""
    object_id = models.CharField(_("object"), max_length=NAME_LENGTH, default="", blank=True)
    name = models.TextField(_("name"), default="", blank=True)
    parameters = models.JSONField(_("parameters"), default=dict)

    class Meta:
        abstract = True

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

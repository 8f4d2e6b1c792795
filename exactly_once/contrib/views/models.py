"""The table of idempotent views: one row for each key of a scope."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from exactly_once.packages import require_app
from exactly_once.sql.fields import NameField, ReadableJSONField, instants
from exactly_once.wire.text import NAME_LENGTH

require_app("exactly_once.contrib.views")


class IdempotentRequest(models.Model):
    """A request whose effect is committed, and its response."""

    id = models.BigAutoField(primary_key=True)
    scope = NameField(_("scope"), max_length=NAME_LENGTH)
    key = NameField(_("key"), max_length=NAME_LENGTH)
    # As its ResolverMatch names it.
    view = models.CharField(_("view"), max_length=NAME_LENGTH)
    # SHA-256 of method, host, path and body.
    fingerprint = models.CharField(max_length=64)
    at = models.DateTimeField(_("time"))
    expires_at = models.DateTimeField(_("expires"))
    # They are written in the transaction that inserts the row. None: the view has committed that by itself.
    status = models.PositiveSmallIntegerField(_("status"), null=True)
    headers = ReadableJSONField(null=True)
    body = models.BinaryField(null=True)

    # For mypy, whose Django plugin does not add it to a model that the package's public names lead to.
    objects: ClassVar[models.Manager[IdempotentRequest]]

    class Meta:
        verbose_name = _("idempotent request")
        verbose_name_plural = _("idempotent requests")
        default_permissions = ("view",)
        constraints = (
            models.UniqueConstraint(fields=["scope", "key"], name="exactly_once_views_once"),
            instants("exactly_once_views_instants", "at", "expires_at"),
        )
        indexes = (models.Index(fields=["expires_at"], name="exactly_once_views_expired"),)

    def __str__(self) -> str:
        return f"{self.view}: {self.key}"

"""The table of endpoints. Their messages are rows of the inbox."""

from __future__ import annotations

import base64
import secrets
from typing import Any, ClassVar

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from exactly_once.packages import require_app
from exactly_once.sql.fields import NameField
from exactly_once.wire.text import NAME_LENGTH, why_no_topic
from inbox.contrib.outgoing_webhooks.addresses import LONGEST_URL, why_no_url

require_app("inbox.contrib.outgoing_webhooks")

MAX_CONCURRENCY = 64
PREFIX = "whsec_"
"""Of secrets."""
_SECRET_BYTES = 32


class State(models.TextChoices):
    ACTIVE = "active", _("Active")
    PAUSED = "paused", _("Paused")
    DISABLED = "disabled", _("Disabled")


def new_secret() -> str:
    return PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def valid_url(url: str) -> None:
    if reason := why_no_url(url):
        raise ValidationError(reason)


def valid_topics(topics: Any) -> None:
    if not isinstance(topics, list) or any(not isinstance(topic, str) or why_no_topic(topic) for topic in topics):
        raise ValidationError(_('It must be a list of topics, such as ["shop.order.placed"]. An empty list means all.'))


class Endpoint(models.Model):
    """A URL that messages are sent to, and how it fares.

    A paused endpoint is tried again at `probe_at`. A disabled one gets no new messages until it is enabled.
    """

    id = models.BigAutoField(primary_key=True)
    # Part of the name of its handler, so it does not change.
    name = NameField(
        max_length=64,
        unique=True,
        validators=[RegexValidator(r"\A[a-z0-9][a-z0-9._-]*\Z", _("Use lower-case letters, digits, '.', '_' and '-'."))],
        help_text=_("It cannot be changed later."),
    )
    url = models.CharField("URL", max_length=LONGEST_URL, validators=[valid_url])
    topics = models.JSONField(
        default=list, blank=True, validators=[valid_topics], help_text=_('A list, ["shop.order.placed"]. [] means all.')
    )
    concurrency = models.PositiveSmallIntegerField(
        default=2,
        validators=[MinValueValidator(1), MaxValueValidator(MAX_CONCURRENCY)],
        help_text=_("The maximum number of requests at a time in one process."),
    )
    # In the form of Standard Webhooks, "whsec_…". Requests are signed with the old one, too, until its time has passed.
    secret = models.CharField(max_length=NAME_LENGTH, default=new_secret)
    old_secret = models.CharField(max_length=NAME_LENGTH, default="", db_default="", blank=True)
    old_secret_until = models.DateTimeField(null=True, blank=True)
    state = models.CharField(max_length=8, choices=State.choices, default=State.ACTIVE)
    state_since = models.DateTimeField(db_default=Now())
    # The last failure, or why it is paused or disabled; "" after a success.
    reason = models.TextField(default="", db_default="", blank=True)
    # Consecutive failed requests.
    failures = models.PositiveIntegerField(default=0, db_default=0)
    probe_at = models.DateTimeField(null=True, blank=True)

    # For mypy, whose Django plugin does not add it to a model that the package's public names lead to.
    objects: ClassVar[models.Manager[Endpoint]]

    class Meta:
        verbose_name = _("webhook endpoint")
        verbose_name_plural = _("webhook endpoints")
        default_permissions = ("view",)
        permissions = (
            ("add_endpoint", "Can add an endpoint"),
            ("edit_endpoint", "Can change the URL, the topics and the concurrency of an endpoint"),
            ("enable_endpoint", "Can enable an endpoint"),
            ("disable_endpoint", "Can disable an endpoint"),
            ("test_endpoint", "Can send a test message to an endpoint"),
            ("rotate_endpoint", "Can give an endpoint a new secret"),
            ("secret_endpoint", "Can see the secret of an endpoint"),
        )

    def __str__(self) -> str:
        return self.name

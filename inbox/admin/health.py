"""The health of the inbox's database in the admin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from django.apps import apps
from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from exactly_once.admin import health as health_admin
from exactly_once.admin.health import HealthAdmin, link_of, oldest, warnings
from exactly_once.admin.sections import Attention, Fact, Link
from exactly_once.operators import database_health as health
from exactly_once.operators.minutes import database_time
from inbox.conf import inbox_options
from inbox.models import DatabaseHealth
from inbox.store import figures


@admin.register(DatabaseHealth)
class InboxHealthAdmin(HealthAdmin):
    def purging(self) -> Sequence[Fact]:
        options, now = inbox_options(), database_time(self.using)
        return [
            oldest(_("Settled messages"), figures.oldest_settled(self.using), options.RETENTION, now),
            oldest(_("Trail"), figures.oldest_entry(self.using), options.TRAIL_RETENTION, now),
        ]


def size_of_tables(alias: str) -> int | None:
    return health_admin.size_of_tables(alias, "inbox")


def health_link() -> Link:
    return link_of("inbox")


def health_warnings(alias: str) -> Iterator[Attention]:
    """The outbox warns of the same, if it is installed."""
    if not apps.is_installed("outbox"):
        yield from warnings(health.pins(alias), health_link())

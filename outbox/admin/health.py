"""The health of the outbox's database in the admin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from exactly_once.admin import health as health_admin
from exactly_once.admin.health import HealthAdmin, link_of, oldest, warnings
from exactly_once.admin.sections import Attention, Fact, Link
from exactly_once.operators import database_health as health
from exactly_once.operators.database_health import TableHealth, summed
from exactly_once.operators.minutes import database_time
from outbox.conf import outbox_options
from outbox.models import DatabaseHealth
from outbox.store import figures
from outbox.store.dialect import HISTORY, TABLE

_MOST_DAYS = 31


@admin.register(DatabaseHealth)
class OutboxHealthAdmin(HealthAdmin):
    def tables(self) -> list[TableHealth] | None:
        """The partitions of history are one line."""
        found = super().tables()
        if found is None:
            return None
        parts = [table for table in found if _is_history(table)]
        others = [table for table in found if not _is_history(table)]
        return sorted([*others, summed(HISTORY, parts)], key=lambda table: table.total_bytes, reverse=True)

    def partitions(self) -> Sequence[TableHealth] | None:
        found = super().tables()
        if found is None:
            return None
        return sorted(filter(_is_history, found), key=lambda table: table.name, reverse=True)[:_MOST_DAYS]

    def purging(self) -> Sequence[Fact]:
        options, now = outbox_options(), database_time(self.using)
        return [
            oldest(_("History"), figures.oldest_settled(self.using), options.keeps, now),
            oldest(_("Trail"), figures.oldest_entry(self.using), options.TRAIL_RETENTION, now),
        ]


def size_of_tables(alias: str) -> int | None:
    return health_admin.size_of_tables(alias, "outbox")


def health_link() -> Link:
    return link_of("outbox")


def health_warnings(alias: str) -> Iterator[Attention]:
    yield from warnings(health.pins(alias), health_link())


def _is_history(table: TableHealth) -> bool:
    name = table.name.rpartition(".")[2]
    return name.startswith(f"{TABLE}_") and name != f"{TABLE}_live"

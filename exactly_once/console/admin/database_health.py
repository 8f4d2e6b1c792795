"""Database health in the admin: sizes, dead rows, the last vacuum, partitions, and what pins the vacuum horizon.

See `operators.database_health`. A figure that the database does not have is shown as unknown.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext as _

from exactly_once.console.admin.pages import PageAdmin
from exactly_once.console.admin.sections import OldestRow, sections
from exactly_once.console.display import duration, number
from exactly_once.console.operators import database_health as health
from exactly_once.console.operators.database_health import Pin, TableHealth
from exactly_once.console.plurals import ngettext
from exactly_once.models import DatabaseHealth
from exactly_once.sql.schema import our_apps
from exactly_once.upkeep.minutes import database_time

_MOST_PARTITIONS = 31
_LONG = timedelta(minutes=10)
_MANY_TRANSACTIONS = 1_000_000
_MARGIN = timedelta(days=1, minutes=10)
"""Whole days of history are dropped, and processes purge in rounds."""


@admin.register(DatabaseHealth)
class DatabaseHealthAdmin(PageAdmin):
    """The health of the database and of the tables of the installed apps."""

    template = "exactly_once/health.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        found, pins, now = our_tables(self.using), health.pins(self.using), database_time(self.using)
        partitions = sorted((table for table in found or () if table.parent), key=lambda table: table.name, reverse=True)
        return {
            "now": now,
            "database": self.using,
            "database_bytes": health.database_bytes(self.using),
            "warnings": list(horizon_warnings(pins)),
            "tables": None if found is None else health.with_partitions_summed(found),
            "partitions": partitions[:_MOST_PARTITIONS],
            "indexes": health.largest_indexes(self.using, _table_names()),
            "pins": None if pins is None else [(_named(pin), pin) for pin in pins],
            "sees_all_sessions": health.sees_all_sessions(self.using),
            "oldest": [
                (f"{section.title}: {row.name}", oldest_text(row, now))
                for section in sections(request)
                for row in section.oldest(self.using)
            ],
        }


def _table_names() -> list[str]:
    """The tables of the installed apps and of their optional packages."""
    return sorted({model._meta.db_table for app in our_apps() for model in app.get_models() if not model._meta.proxy})


def our_tables(alias: str) -> list[TableHealth] | None:
    """The tables of the installed apps, the largest first; None if the database has no statistics of sizes."""
    return health.tables(alias, _table_names())


def horizon_warnings(pins: Sequence[Pin] | None) -> Iterator[str]:
    """What has held back the vacuum horizon for long: one sentence for all sessions."""
    opened = [(pin.open_for, pin) for pin in pins or () if pin.open_for is not None and pin.open_for >= _LONG]
    if opened:
        yield ngettext(
            "%(what)s has held back the vacuum horizon for %(duration)s: dead rows are not removed, and relays read past them.",
            "%(what)s have held back the vacuum horizon, the first for %(duration)s: dead rows are not removed, and relays "
            "read past them.",
            len(opened),
            what=", ".join(_named(pin) for _for, pin in opened),
            duration=duration(max(lasted for lasted, _pin in opened)),
        )
    for pin in pins or ():
        if pin.open_for is None and pin.age >= _MANY_TRANSACTIONS:
            words = _("%(what)s has held back the vacuum horizon for %(count)s transactions: dead rows are not removed.")
            yield words % {"what": _named(pin), "count": number(pin.age)}


def oldest_text(row: OldestRow, now: datetime) -> str:
    """The age of the oldest row, and how far the purge is behind."""
    if row.at is None:
        return _("no rows")
    old = now - row.at
    if row.kept is None:
        return duration(old)
    given = {"age": duration(old), "kept": duration(row.kept)}
    if old <= row.kept + _MARGIN:
        return _("%(age)s, kept for %(kept)s") % given
    return _("%(age)s, kept for %(kept)s: the purge is %(lag)s behind") % {**given, "lag": duration(old - row.kept)}


def _named(pin: Pin) -> str:
    kinds = {
        "session": _("Session %(name)s"),
        "replication slot": _("Replication slot %(name)s"),
        "prepared transaction": _("Prepared transaction %(name)s"),
    }
    name = kinds[pin.kind] % {"name": pin.name}
    details = ", ".join(filter(None, (pin.application, pin.user)))
    return f"{name} ({details})" if details else name

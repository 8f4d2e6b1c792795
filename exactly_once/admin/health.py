"""Database health in the admin: sizes, dead rows, the last vacuum, partitions, and what pins the vacuum horizon.

See `operators.database_health`. A figure that the database does not have is shown as unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.apps import apps
from django.core.exceptions import PermissionDenied
from django.forms import Media
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _

from exactly_once.admin.acting import ReadOnlyAdmin
from exactly_once.admin.sections import Attention, Fact, Link, Text, bytes_text
from exactly_once.display import age, duration, identifier
from exactly_once.operators import database_health as health
from exactly_once.operators.database_health import Pin, TableHealth
from exactly_once.operators.minutes import database_time
from exactly_once.sql.labels import label_of

_PAGE = "exactly_once/health.html"
_TABLES = "exactly_once/health_tables.html"
_LONG = timedelta(minutes=10)
_MANY_TRANSACTIONS = 1_000_000
_MARGIN = timedelta(days=1, minutes=10)
"""Whole days of history are dropped, and processes purge in rounds."""


class HealthAdmin(ReadOnlyAdmin):
    """The health of the database and of the tables of one app."""

    actions = None

    @property
    def media(self) -> Media:
        return Media(css={"all": ["exactly_once/admin.css", "exactly_once/overview.css"]})

    def tables(self) -> list[TableHealth] | None:
        """The tables of the app, the largest first; None if the database has no statistics of sizes."""
        return health.tables(self.using, table_names(self.opts.app_label))

    def partitions(self) -> Sequence[TableHealth] | None:
        """The partitions of history, the latest first; None if there are none."""
        return None

    def purging(self) -> Sequence[Fact]:
        """The oldest rows of each kind, and how long they are kept."""
        raise NotImplementedError

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        found, partitions = self.tables(), self.partitions()
        indexes = health.largest_indexes(self.using, table_names(self.opts.app_label))
        pins, now = health.pins(self.using), database_time(self.using)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Database health"),
            "opts": self.opts,
            "media": self.media,
            "database": self.using,
            "database_size": bytes_text(health.database_bytes(self.using)),
            "warnings": [each.text for each in warnings(pins)],
            "tables": None if found is None else _rendered(found, now),
            "partitions": None if partitions is None else _rendered(partitions, now),
            "indexes": None if indexes is None else [_index(index) for index in indexes],
            "pins": None if pins is None else [_pin(pin) for pin in pins],
            "sees_all_sessions": health.sees_all_sessions(self.using),
            "purging": [(fact.name, fact.value) for fact in self.purging()],
            **(extra_context or {}),
        }
        return TemplateResponse(request, _PAGE, context)


def table_names(app: str) -> list[str]:
    """The tables of an app."""
    models = apps.get_app_config(label_of(app)).get_models()
    return sorted({model._meta.db_table for model in models if not model._meta.proxy})


def size_of_tables(alias: str, app: str) -> int | None:
    """The size of the tables of an app and of their indexes; None if the database has no statistics of sizes."""
    found = health.tables(alias, table_names(app))
    return None if found is None else sum(table.total_bytes for table in found)


def link_of(app: str) -> Link:
    label = label_of(app)
    return Link(page=f"{label}_databasehealth_changelist", permission=f"{label}.view_databasehealth")


def warnings(pins: Sequence[Pin] | None, link: Link | None = None) -> Iterator[Attention]:
    """What has held back the vacuum horizon for long."""
    for pin in pins or ():
        if pin.open_for is not None and pin.open_for >= _LONG:
            words = _(
                "%(what)s has held back the vacuum horizon for %(duration)s: dead rows are not removed, and relays "
                "read past them."
            )
            yield Attention(text=words % {"what": _named(pin), "duration": duration(pin.open_for)}, link=link)
        elif pin.open_for is None and pin.age >= _MANY_TRANSACTIONS:
            words = _("%(what)s has held back the vacuum horizon for %(count)s transactions: dead rows are not removed.")
            yield Attention(text=words % {"what": _named(pin), "count": f"{pin.age:,}"}, link=link)


def oldest(name: Text, instant: datetime | None, kept: timedelta | None, now: datetime) -> Fact:
    """The age of the oldest row, and how far the purge is behind."""
    if instant is None:
        return Fact(name=name, value=_("no rows"))
    old = now - instant
    if kept is None:
        return Fact(name=name, value=duration(old))
    if old <= kept + _MARGIN:
        return Fact(name=name, value=_("%(age)s, kept for %(kept)s") % {"age": duration(old), "kept": duration(kept)})
    words = _("%(age)s, kept for %(kept)s: the purge is %(lag)s behind")
    return Fact(name=name, value=words % {"age": duration(old), "kept": duration(kept), "lag": duration(old - kept)})


def _named(pin: Pin) -> str:
    kinds = {
        "session": _("Session %(name)s"),
        "replication slot": _("Replication slot %(name)s"),
        "prepared transaction": _("Prepared transaction %(name)s"),
    }
    name = kinds[pin.kind] % {"name": pin.name}
    details = ", ".join(filter(None, (pin.application, pin.user)))
    return f"{name} ({details})" if details else name


def _rendered(tables: Sequence[TableHealth], now: datetime) -> SafeString:
    context = {"rows": [_row(table, now) for table in tables]}
    return mark_safe(render_to_string(_TABLES, context))  # noqa: S308 - rendered by a template, which escapes


def _row(table: TableHealth, now: datetime) -> dict[str, Any]:
    unknown = _("unknown")
    return {
        "name": identifier(table.name),
        "partitions": table.partitions,
        "table": bytes_text(table.table_bytes),
        "indexes": bytes_text(table.index_bytes),
        "rows": unknown if table.rows is None else f"{table.rows:,}",
        "dead": unknown if table.dead_rows is None else f"{table.dead_rows:,}",
        "vacuum": age(table.last_vacuum, now) if table.last_vacuum else _("never"),
        "analyze": age(table.last_analyze, now) if table.last_analyze else _("never"),
    }


def _index(index: health.IndexHealth) -> tuple[str, str, str]:
    return identifier(index.name), bytes_text(index.size_bytes), _("unknown") if index.scans is None else f"{index.scans:,}"


def _pin(pin: Pin) -> dict[str, str]:
    return {
        "name": _named(pin),
        "state": pin.state or _("unknown"),
        "age": f"{pin.age:,}",
        "open_for": _("unknown") if pin.open_for is None else duration(pin.open_for),
        "query_for": "" if pin.query_for is None else duration(pin.query_for),
    }

"""Columns of a list and fields of a page, declared as data: a label, an attribute of the row, and how its value is shown.

topic_name = shown(_("topic"), "topic", identifier)
created = instant(_("created"), "created_at")
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.utils.safestring import SafeString

from exactly_once.console.display import as_text, moment

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise as Text


def computed(label: Text, render: Callable[[Any], SafeString | str]) -> Any:
    """A column that is computed from the row: a method of a page."""

    def column(model_admin: Any, row: Any) -> SafeString | str:
        return render(row)

    return admin.display(description=label)(column)


def shown(label: Text, name: str, render: Callable[[Any], SafeString | str]) -> Any:
    """A column with the value of an attribute; a dot leads to that of a related row."""
    value = attrgetter(name)
    return computed(label, lambda row: render(value(row)))


def instant(label: Text, name: str, render: Callable[[datetime | None, datetime], SafeString] = moment) -> Any:
    """A column with an instant, as it is seen from the database's clock."""
    value = attrgetter(name)
    return computed(label, lambda row: render(value(row), row.database_now))


def text(value: str) -> SafeString:
    """A text of several lines, for `shown`."""
    return as_text(value).as_html()

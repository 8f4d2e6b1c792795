"""Is a database migrated for this version of an app?

Asked for is what this version reads and writes: every table and column of the app's models. What a newer version has added is
no obstacle, so that old processes go on during a rolling deploy. It is the tables that are looked at and not Django's record of
applied migrations, because that can be ahead of them (`--fake`) or behind (SQL that a database administrator ran).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.management.base import CommandError
from django.db import DEFAULT_DB_ALIAS, DatabaseError, InterfaceError, connections, router, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from outbox.kernel.reminder import Reminder

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import Model

logger = logging.getLogger(__name__)

_MISSING = {"42P01", "42703"}
"""SQLSTATEs: no such table, no such column."""
_MISSING_IN_SQLITE = ("no such table", "no such column")
_MOST_NAMES = 3
_reminder = Reminder()


def require_schema(alias: str, *labels: str) -> None:
    """For a command, before it begins: are the tables of these apps there, as this version needs them?

    Raises:
        CommandError: no such alias, or not migrated. A database that is unavailable is not an error here.
    """
    if alias not in connections:
        raise CommandError(f"There is no database {alias!r}. DATABASES has: {', '.join(connections)}.")
    for label in labels:
        if problem := why_unmigrated(alias, label):
            raise CommandError(problem)


def why_unmigrated(alias: str, label: str, *, begun: bool = False) -> str:
    """What the database lacks of the app's tables and what to run, in one line; "" when it has all, or does not answer.

    Args:
        begun: a database that has none of the tables, or is not to have them, is right, too.
    """
    models = [model for model in apps.get_app_config(label).get_models() if router.allow_migrate_model(alias, model)]
    if not models and begun:
        return ""
    if not models:
        return f"The database routers keep the app {label!r} out of the database {alias!r}."
    try:
        if begun and not any(_has(connections[alias], model._meta.db_table, []) for model in models):
            return ""
        missing = [name for model in models for name in _missing(connections[alias], model)]
    except (DatabaseError, InterfaceError):
        return ""
    if not missing:
        return ""
    option = "" if alias == DEFAULT_DB_ALIAS else f" --database {alias}"
    return (
        f"The database {alias!r} is not migrated for this version of {label!r}: it has no {_listed(missing)}. "
        f"Run `python manage.py migrate {label}{option}`{_named(_unapplied(alias, label))}."
    )


def _missing(connection: BaseDatabaseWrapper, model: type[Model]) -> Iterator[str]:
    table = model._meta.db_table
    columns = [str(field.column) for field in model._meta.local_concrete_fields]
    if _has(connection, table, columns):
        return
    if not _has(connection, table, []):
        yield f"table {table}"
        return
    yield from (f"column {table}.{column}" for column in columns if not _has(connection, table, [column]))


def _has(connection: BaseDatabaseWrapper, table: str, columns: Iterable[str]) -> bool:
    quote = connection.ops.quote_name
    # Qualified, because SQLite takes an unknown name in quotes for a text.
    asked = ", ".join(f"{quote(table)}.{quote(column)}" for column in columns) or "1"
    # Inside a transaction a failed statement would end it.
    kept = transaction.atomic(using=connection.alias) if connection.in_atomic_block else nullcontext()
    try:
        with kept, connection.cursor() as cursor:
            cursor.execute(f"SELECT {asked} FROM {quote(table)} WHERE 1 = 0")  # noqa: S608 - names of models, quoted
    except DatabaseError as error:
        if not is_missing(error):
            raise
        return False
    return True


def is_missing(error: BaseException) -> bool:
    """Does the database say that it has no such table or column?"""
    if not isinstance(error, DatabaseError):
        return False
    if sqlstate := getattr(error.__cause__, "sqlstate", None):
        return sqlstate in _MISSING
    return str(error).startswith(_MISSING_IN_SQLITE)


def report_missing(error: BaseException) -> None:
    """For a process that meets it later, as in a deploy in the wrong order: once a minute, whichever of its loops it is."""
    if _reminder.is_due():
        logger.error(
            "A database is not migrated for this version: %s. Run `python manage.py migrate` on it. It is tried again; no "
            "message is lost and no attempt is counted.",
            str(error).partition("\n")[0],
        )


def _unapplied(alias: str, label: str) -> list[str]:
    module, _ = MigrationLoader.migrations_module(label)
    if module is None:
        return []
    package: Any = import_module(module)
    names = {found.name for found in iter_modules(package.__path__) if not found.ispkg and found.name[0] not in "_~"}
    applied = MigrationRecorder(connections[alias]).applied_migrations()
    return sorted(name for name in names if (label, name) not in applied)


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _named(migrations: list[str]) -> str:
    return f", which applies {', '.join(migrations)}" if migrations else ""

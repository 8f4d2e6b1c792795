"""The requirements of both apps on a database, as messages of `manage.py check`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning
from django.db import connections, router
from django.db.models import Model

_SUPPORTED_VENDORS = ("postgresql", "sqlite")
_FOREIGN_OPTIONS = {
    "postgresql": {"check_same_thread", "detect_types", "init_command", "timeout", "transaction_mode"},
    "sqlite": {"assume_role", "connect_timeout", "options", "pool", "server_side_binding", "service", "sslmode"},
}
"""By vendor: `OPTIONS` of the other one. Django passes them on, and each attempt to connect fails."""


def unsupported_databases(model: type[Model], databases: Sequence[str] | None, check_id: str) -> list[CheckMessage]:
    """Databases for `model` on which the guarantees do not hold."""
    return [
        Error(
            f"The database {alias!r} is {connections[alias].display_name}, on which the {model._meta.app_label} is not "
            "supported.",
            hint="Use PostgreSQL, or SQLite to begin with.",
            id=check_id,
        )
        for alias in _holding(model, databases or ())
        if connections[alias].vendor not in _SUPPORTED_VENDORS
    ]


def deferred_sqlite(model: type[Model], check_id: str) -> list[CheckMessage]:
    """SQLite databases for `model` whose transactions begin as readers: two of them that write fail at once."""
    return [
        Warning(
            f"The SQLite database {alias!r} begins transactions as a reader; under load they fail with 'database is locked'.",
            hint=f"Set DATABASES[{alias!r}]['OPTIONS'] = {{'transaction_mode': 'IMMEDIATE', 'timeout': 20, 'init_command': "
            "'PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;'}.",
            id=check_id,
        )
        for alias in _holding(model, connections)
        if connections[alias].vendor == "sqlite"
        and connections[alias].settings_dict["OPTIONS"].get("transaction_mode") not in {"IMMEDIATE", "EXCLUSIVE"}
    ]


def unfit_settings(model: type[Model], check_id: str) -> list[CheckMessage]:
    """Database settings for `model` that break connections, transactions or instants."""
    return [Error(problem, hint=hint, id=check_id) for problem, hint in _unfit_settings(model)]


def _unfit_settings(model: type[Model]) -> Iterator[tuple[str, str]]:
    for alias in _holding(model, connections):
        given = connections[alias].settings_dict
        if foreign := sorted(_FOREIGN_OPTIONS.get(connections[alias].vendor, set()) & {*given["OPTIONS"]}):
            name, given_here = connections[alias].display_name, f"DATABASES[{alias!r}]['OPTIONS'] has {', '.join(foreign)}"
            yield f"{given_here}, which {name} does not support, so every connection fails.", "Remove them."
        if not given["AUTOCOMMIT"]:
            problem = f"DATABASES[{alias!r}]['AUTOCOMMIT'] is off, so atomic() commits nothing at its end."
            yield problem, "Remove AUTOCOMMIT; Django's default is correct."
        if given["TIME_ZONE"] and connections[alias].vendor == "sqlite":
            problem = (
                f"DATABASES[{alias!r}]['TIME_ZONE'] is {given['TIME_ZONE']!r}: delayed messages would be due at the wrong time."
            )
            yield problem, "Remove TIME_ZONE from this database; the project's TIME_ZONE controls how times are displayed."
    if not settings.USE_TZ:
        problem = "USE_TZ is False: instants without a time zone cannot be compared with those of another service."
        yield problem, "Set it to True."


def _holding(model: type[Model], aliases: Iterable[str]) -> list[str]:
    return [alias for alias in aliases if router.allow_migrate_model(alias, model)]

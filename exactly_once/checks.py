"""`manage.py check` for what both apps need: databases, their settings, and the functions that redact."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any, TypeVar

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, connections, router

from exactly_once.conf.settings import why_not_loaded
from exactly_once.packages import registered
from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.schema import (
    behind_their_tables,
    changed_collation,
    listed,
    our_apps,
    our_models,
    unreadable,
    without_identity,
)
from exactly_once.upkeep.history import History

_Options = TypeVar("_Options")
_Found = TypeVar("_Found")

_SUPPORTED_VENDORS = ("postgresql", "sqlite")
_LABEL, _LABEL_LENGTH = re.compile("[a-z_][a-z0-9_]*"), 33
"""PostgreSQL truncates names to 63 characters: `<label>_outboxmessage_history_default`."""
_FOREIGN_OPTIONS = {
    "postgresql": {"check_same_thread", "detect_types", "init_command", "timeout", "transaction_mode"},
    "sqlite": {"assume_role", "connect_timeout", "options", "pool", "server_side_binding", "service", "sslmode"},
}
"""By vendor: `OPTIONS` of the other one. Django passes them on, and each attempt to connect fails."""


def check_with(options: Callable[[], _Options], **registered: Any) -> Callable[..., Any]:
    """Register a generator of problems that gets these options. While they are invalid, which another check reports, it is not
    called.
    """

    def decorated(check: Callable[[_Options], Iterable[CheckMessage]]) -> Callable[..., list[CheckMessage]]:
        def run(app_configs: object, **kwargs: Any) -> list[CheckMessage]:
            try:
                given = options()
            except ImproperlyConfigured:
                return []
            return [*check(given)]

        register(run, **registered)
        return run

    return decorated


@register(Tags.database)
def check_databases(app_configs: object, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """exactly_once.E001: a database on which the guarantees do not hold."""
    return [
        Error(
            f"The database {alias!r} is {connections[alias].display_name}, on which messages are not supported.",
            hint="Use PostgreSQL, or SQLite to begin with.",
            id="exactly_once.E001",
        )
        for alias in _with_our_tables(databases or ())
        if connections[alias].vendor not in _SUPPORTED_VENDORS
    ]


def check_half(setting: str, options: type, history: History, *, settings_id: str, rights_id: str, partitions_id: str) -> None:
    """Register the checks that both halves have.

    Args:
        setting: the name of its dictionary.
        settings_id, rights_id, partitions_id: of the warnings about names of settings, and about history.
    """

    def check_settings(app_configs: object, **kwargs: Any) -> list[CheckMessage]:
        """A setting of the project that is named like an option of the dictionary, and is not read."""
        return [*_warnings_of_settings(setting, options, settings_id)]

    def check_history(app_configs: object, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
        """A user that may not make and drop partitions, and a partition whose rows cannot be changed while it is published."""
        here = [alias for alias in databases or () if router.allow_migrate_model(alias, history.model)]
        return [*_warnings_of_rights(history, here, rights_id), *_warnings_of_partitions(history, here, partitions_id)]

    register(check_settings)
    register(check_history, Tags.database)


def _warnings_of_settings(setting: str, options: type, id_: str) -> Iterator[CheckMessage]:
    names = [field.name for field in dataclasses.fields(options)]
    for name in dir(settings):
        if name.startswith(f"{setting}_") and (close := get_close_matches(name.removeprefix(f"{setting}_"), names, n=1)):
            hint = f"Write it into the dictionary {setting}, as {setting}[{close[0]!r}]."
            yield Warning(f"The setting {name} is not read.", hint=hint, id=id_)


def _warnings_of_rights(history: History, aliases: Iterable[str], id_: str) -> Iterator[CheckMessage]:
    app = id_.partition(".")[0]
    for alias in aliases:
        if is_postgresql(connections[alias]) and _read(history.days.may_be_made, alias) is False:
            yield Warning(
                f"The user of the database {alias!r} may not make or drop the partitions of the {app}'s history. A process "
                "that does its housekeeping as this user keeps all of it in the default partition, and deletes old messages "
                "one by one.",
                hint=f"Make it the owner of the tables of the {app}, with CREATE on their schema; or silence this check if "
                "such processes run as another user.",
                id=id_,
            )


def _warnings_of_partitions(history: History, aliases: Iterable[str], id_: str) -> Iterator[CheckMessage]:
    for alias in aliases:
        for name in _read(without_identity, alias, history.model) or ():
            yield Warning(
                f"In the database {alias!r}, the partition {name} has no primary key and no replica identity. While a "
                "publication has it, as one FOR ALL TABLES, its messages cannot be counted as duplicates, restored or purged.",
                hint=f"Run `ALTER TABLE {name} ADD PRIMARY KEY ({history.by})`.",
                id=id_,
            )


@register(Tags.database)
def check_sequences(app_configs: object, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """exactly_once.E006: a sequence that draws ids which its table has already."""
    return [
        Error(problem, hint=f"Stop the processes that publish and handle messages. Run `{statement}`.", id="exactly_once.E006")
        for alias in databases or ()
        for problem, statement in behind_their_tables(alias)
    ]


@register(Tags.database)
def check_unreadable(app_configs: object, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """exactly_once.W003: a sequence, or a table with its ids, that the user may not read: nothing finds it behind."""
    return [
        Warning(
            f"The user of the database {alias!r} may not read {listed(found)}. Neither a check nor a process of this user "
            "finds out that new rows would get ids which exist, as after a restore.",
            hint="Grant it SELECT, USAGE on the sequences, and SELECT on the tables and their partitions; or silence this "
            "check if relays and consumers run as another user.",
            id="exactly_once.W003",
        )
        for alias in databases or ()
        if (found := _read(unreadable, alias, our_models(alias)))
    ]


@register(Tags.database)
def check_collations(app_configs: object, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """exactly_once.W002: a database whose indexes may be in the order of another version of its collation."""
    found = ((alias, _read(changed_collation, alias)) for alias in _with_our_tables(databases or ()))
    return [
        Warning(
            f"The database {alias!r} has version {changed[1]} of its collation, and the server has {changed[2]}. Messages are "
            "deduplicated and ordered without it, but an index of text of another app may miss rows, and accept a second row.",
            hint=f'Run `REINDEX DATABASE "{changed[0]}"`, then `ALTER DATABASE "{changed[0]}" REFRESH COLLATION VERSION`.',
            id="exactly_once.W002",
        )
        for alias, changed in found
        if changed
    ]


def _read(function: Callable[..., _Found], *arguments: Any) -> _Found | None:
    """What a function has found; None if the database is not migrated, which another check says, or unavailable."""
    try:
        return function(*arguments)
    except (DatabaseError, InterfaceError):
        return None


@register()
def check_database_settings(app_configs: object, **kwargs: Any) -> list[CheckMessage]:
    """exactly_once.E002: settings under which a connection, a transaction or an instant fails."""
    return [Error(problem, hint=hint, id="exactly_once.E002") for problem, hint in _unfit_settings()]


def _unfit_settings() -> Iterator[tuple[str, str]]:
    for alias in _with_our_tables(connections):
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


@register()
def check_labels(app_configs: object, **kwargs: Any) -> list[CheckMessage]:
    """exactly_once.E004: a label from which no name of a table can be made that PostgreSQL reads unquoted."""
    return [
        Error(
            f"The label of the app {app.name!r} is {app.label!r}. Statements contain its tables' names unquoted.",
            hint=f"Set in its AppConfig a label of at most {_LABEL_LENGTH} lower-case letters (a-z), digits and underscores.",
            id="exactly_once.E004",
        )
        for app in our_apps()
        if len(app.label) > _LABEL_LENGTH or not _LABEL.fullmatch(app.label)
    ]


@register()
def check_tenants(app_configs: object, **kwargs: Any) -> list[CheckMessage]:
    """exactly_once.E005: tables in the schema of each tenant, as django-tenants creates them."""
    ours = {app.name for app in our_apps()}
    shared = getattr(settings, "PUBLIC_SCHEMA_NAME", "public")
    kinds = [given["APPS"] for name, given in getattr(settings, "TENANT_TYPES", {}).items() if name != shared]
    of_tenants = dict.fromkeys(chain(getattr(settings, "TENANT_APPS", ()), *kinds))
    found = [entry for entry in of_tenants if AppConfig.create(entry).name in ours]
    if not found:
        return []
    return [
        Error(
            f"The apps of the tenants contain {', '.join(map(repr, found))}. A process works in one schema, so no relay sends "
            "the messages in the schemas of the tenants.",
            hint="Move them to SHARED_APPS. All tenants then share one outbox and one inbox, and a message names its tenant; "
            "see 'Tenants in schemas' in the documentation.",
            id="exactly_once.E005",
        )
    ]


@register()
def check_redaction(app_configs: object, **kwargs: Any) -> list[CheckMessage]:
    """exactly_once.E003: REDACT or REDACT_ERRORS names a function that cannot be loaded."""
    given = {setting: getattr(settings, setting, None) for setting in ("OUTBOX", "INBOX")}
    return [
        Error(
            f"{setting}[{name!r}] is {path!r}, which cannot be loaded: {reason}.",
            hint="Until it can, no payload is shown (REDACT), or no error is stored (REDACT_ERRORS). Set it to the dotted path "
            "of a function.",
            id="exactly_once.E003",
        )
        for setting, options in given.items()
        for name in ("REDACT", "REDACT_ERRORS")
        if isinstance(options, dict) and isinstance(path := options.get(name), str) and path
        if (reason := why_not_loaded(path))
    ]


@register()
def check_sqlite_mode(app_configs: object, **kwargs: Any) -> list[CheckMessage]:
    """exactly_once.W001: SQLite whose transactions begin as readers: two of them that write fail at once."""
    return [
        Warning(
            f"The SQLite database {alias!r} begins transactions as a reader; under load they fail with 'database is locked'.",
            hint=f"Set DATABASES[{alias!r}]['OPTIONS'] = {{'transaction_mode': 'IMMEDIATE', 'timeout': 20, 'init_command': "
            "'PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;'}.",
            id="exactly_once.W001",
        )
        for alias in _with_our_tables(connections)
        if connections[alias].vendor == "sqlite"
        and connections[alias].settings_dict["OPTIONS"].get("transaction_mode") not in {"IMMEDIATE", "EXCLUSIVE"}
    ]


def _with_our_tables(aliases: Iterable[str]) -> list[str]:
    """Databases for a table of the outbox or of the inbox."""
    models = [model for app in our_apps() if app.name in registered() for model in app.get_models()]
    return [alias for alias in aliases if any(router.allow_migrate_model(alias, model) for model in models)]

"""Check that a database is migrated for this version of an app, and intact.

It must have every table and column of the app's models, because this version reads and writes them. Additional ones of a newer
version are accepted, so that old processes continue during a rolling deploy. The tables are looked at, not Django's record of
applied migrations, because the record can be ahead of them (`--fake`) or behind (SQL that a database administrator ran).

A restore, a switch to a replica, or an upgrade of the operating system can leave something wrong in a PostgreSQL database. Its
tables and rows are complete, so nothing fails at once: a sequence draws numbers that exist already, an index is in the order of
another collation, a partition is published and has no key. No check reads a whole table, or locks many partitions together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING

from django.apps import apps
from django.core.management.base import CommandError
from django.db import DEFAULT_DB_ALIAS, DatabaseError, InterfaceError, connections, router, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.models import AutoField, Model
from django.utils.translation import gettext as _

from exactly_once.packages import label_of, registered
from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.faults import diagnosis_of, sqlstate_of

if TYPE_CHECKING:
    from django.apps import AppConfig
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import Model

_MISSING = {"42P01", "42703"}
"""SQLSTATEs: no such table, no such column."""
_UNIQUE_VIOLATION = "23505"
_MISSING_IN_SQLITE = ("no such table", "no such column")
_MOST_NAMES = 3
_COLUMNS = "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
_NUMBERED = (
    "SELECT sequence, name, leaf::text, CASE WHEN NOT has_sequence_privilege(sequence, 'SELECT') THEN sequence "
    "WHEN NOT has_table_privilege(leaf, 'SELECT') THEN leaf::text END "
    "FROM unnest(%s::text[], %s::text[]) AS numbered(name, by) "
    "LEFT JOIN LATERAL pg_partition_tree(to_regclass(name)) tree ON tree.isleaf "
    "CROSS JOIN LATERAL (SELECT coalesce(tree.relid, to_regclass(name)) AS leaf) l "
    "CROSS JOIN LATERAL (SELECT CASE WHEN to_regclass(by) IS NOT NULL THEN pg_get_serial_sequence(by, 'id') END AS sequence) s "
    "WHERE leaf IS NOT NULL AND sequence IS NOT NULL"
)
"""Tables without partitions, and partitions, each with the sequence of its ids, and what of both the user may not read."""
_HAS_NEXT = "EXISTS (SELECT 1 FROM {table} WHERE id >= (SELECT last_value + is_called::int FROM {sequence}))"
"""The sequence is read after the snapshot, so it is not behind the rows that transactions insert meanwhile."""
_TABLES_AT_ONCE = 30
"""Each takes some locks of the server's lock table until the end of the transaction."""
_WITHOUT_IDENTITY = (
    "SELECT tree.relid::regclass::text FROM pg_partition_tree(to_regclass(%s)) tree "
    "JOIN pg_class leaf ON leaf.oid = tree.relid AND leaf.relkind = 'r' WHERE leaf.relreplident <> 'f' AND NOT EXISTS ("
    "SELECT 1 FROM pg_index WHERE indrelid = leaf.oid AND (indisreplident OR leaf.relreplident = 'd' AND indisprimary)"
    ") ORDER BY 1"
)
_HAS_COLLATION_VERSIONS = 150000


def require_schema(alias: str, *packages: str) -> None:
    """Check before a command runs that the tables of these apps, and of their optional packages, are migrated for this version.

    Raises:
        CommandError: the alias does not exist, or its database is not migrated. An unavailable database is not an error here.
    """
    require_alias(alias)
    problems = []
    for package in dict.fromkeys(("exactly_once", *packages)):
        for part in parts_of(package):
            # The tables of an optional package may be in another database.
            is_here = part.name == package or any(router.allow_migrate_model(alias, model) for model in part.get_models())
            if is_here and (problem := why_unmigrated(alias, part.label)):
                problems.append(problem)
    if problems:
        raise CommandError(" ".join(problems))


def require_alias(alias: str) -> None:
    """Raises CommandError: DATABASES has no such alias."""
    if alias not in connections:
        words = _("There is no database %(alias)s. DATABASES has: %(known)s.")
        raise CommandError(words % {"alias": repr(alias), "known": ", ".join(connections)})


def require_usable(alias: str, *packages: str) -> None:
    """Check before a process starts what `require_schema` checks, and that no sequence is behind its table.

    The sequences of all apps are checked, because any handler may publish.

    Raises:
        CommandError: as `require_schema`; or new rows would get the ids of existing ones, or come before them.
    """
    require_schema(alias, *packages)
    if behind := behind_their_tables(alias):
        raise CommandError(" ".join(f"{problem} Run `{statement}`." for problem, statement in behind))


def behind_their_tables(alias: str) -> list[tuple[str, str]]:
    """For each sequence of ours that is behind its table, one sentence, and the statement that corrects it.

    What the user may not read is not compared, see `unreadable`.
    """
    try:
        found = list(sequences_behind(alias, our_models(alias)))
    except (DatabaseError, InterfaceError):
        return []  # unavailable
    return [
        (f"In the database {alias!r}, the sequence {sequence} is behind its table, as after a restore or a switch.", statement)
        for sequence, statement in found
    ]


def our_apps() -> list[AppConfig]:
    """The installed apps of this project, with their optional packages."""
    return [part for package in ("exactly_once", *registered()) for part in parts_of(package)]


def our_models(alias: str) -> list[type[Model]]:
    """The models of our apps whose tables are in this database."""
    models = [model for part in our_apps() for model in part.get_models()]
    return [model for model in models if router.allow_migrate_model(alias, model)]


def parts_of(package: str) -> list[AppConfig]:
    """The app in `package` if it is installed, and after it its installed optional packages."""
    parts = (part for part in apps.get_app_configs() if f"{part.name}.".startswith(f"{package}."))
    return sorted(parts, key=attrgetter("name"))


def why_unmigrated(alias: str, app: str, *, begun: bool = False) -> str:
    """One line with the missing tables or columns and the command to run; "" if none is missing or the database is unavailable.

    Args:
        app: its package or its label.
        begun: also accept a database that has none of the tables, or for which the routers do not allow them, and
            `DATABASES["default"] = {}`.
    """
    label = label_of(app)
    tables = (model for model in apps.get_app_config(label).get_models() if not model._meta.proxy)
    models = [model for model in tables if router.allow_migrate_model(alias, model)]
    if begun and (not models or connections[alias].vendor == "unknown"):
        return ""
    if not models:
        return f"The database routers keep the app {label!r} out of the database {alias!r}."
    try:
        found = {model: _columns(connections[alias], model) for model in models}
    except (DatabaseError, InterfaceError):
        return ""
    missing = [name for model, columns in found.items() for name in _missing(model, columns)]
    if not missing or (begun and not any(found.values())):
        return ""
    option = "" if alias == DEFAULT_DB_ALIAS else f" --database {alias}"
    return (
        f"The database {alias!r} is not migrated for this version of {label!r}: it has no {listed(missing)}. "
        f"Run `python manage.py migrate {label}{option}`{_named(_unapplied(alias, label))}."
    )


def _columns(connection: BaseDatabaseWrapper, model: type[Model]) -> set[str]:
    """The columns of its table in the database; none: there is no such table."""
    table = model._meta.db_table
    if is_postgresql(connection):
        found = fetch(connection, _COLUMNS, [connection.ops.quote_name(table)])
    else:
        found = fetch(connection, "SELECT name FROM pragma_table_info(%s)", [table])
    return {column for (column,) in found}


def _missing(model: type[Model], columns: set[str]) -> Iterator[str]:
    table = model._meta.db_table
    if not columns:
        yield f"table {table}"
        return
    yield from (f"column {table}.{field.column}" for field in model._meta.local_concrete_fields if field.column not in columns)


def is_missing(error: BaseException) -> bool:
    """Does the error say that a table or column is missing, or the next number of one of our sequences?"""
    if not isinstance(error, DatabaseError):
        return False
    if sqlstate := sqlstate_of(error):
        return sqlstate in _MISSING or is_number_taken(error)
    return str(error).startswith(_MISSING_IN_SQLITE)


def is_number_taken(error: BaseException) -> bool:
    """Is there a row of ours already with the id that a sequence has drawn?"""
    if sqlstate_of(error) != _UNIQUE_VIOLATION or (found := diagnosis_of(error)) is None:
        return False
    tables = tuple(model._meta.db_table for model in numbered(model for part in our_apps() for model in part.get_models()))
    return (found.constraint_name or "").endswith("_pkey") and (found.table_name or "").startswith(tables)


def describe_missing(error: BaseException, alias: str) -> str:
    """What is missing at run time, as after a deploy in the wrong order or a restore, and what to run."""
    for part in our_apps():
        with suppress(DatabaseError, InterfaceError):
            if problem := why_unmigrated(alias, part.label, begun=True):
                return problem
    for problem, statement in behind_their_tables(alias):
        return f"{problem} Run `{statement}`."
    said = str(error).partition("\n")[0]
    return f"The database {alias!r} is not migrated for this version: {said}. Run `python manage.py migrate` on it."


def _unapplied(alias: str, label: str) -> list[str]:
    loader = MigrationLoader(connections[alias])
    return sorted(name for app, name in loader.disk_migrations if app == label and (app, name) not in loader.applied_migrations)


def listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _named(migrations: list[str]) -> str:
    return f", which applies {', '.join(migrations)}" if migrations else ""


def numbered(models: Iterable[type[Model]]) -> dict[type[Model], type[Model]]:
    """Those of these models whose ids come from a sequence, each with the model that has the sequence.

    A model whose ids are those of another one names it, as `numbered_by`.
    """
    by = {model: getattr(model, "numbered_by", model) for model in models if not model._meta.proxy}
    return {model: numbers for model, numbers in by.items() if isinstance(numbers._meta.pk, AutoField)}


def sequences_behind(alias: str, models: Iterable[type[Model]]) -> Iterator[tuple[str, str]]:
    """The sequences whose next id is not above the ids of these models, each with the statement that corrects it."""
    leaves, tables = defaultdict[str, list[str]](list), defaultdict[str, dict[str, None]](dict)
    for sequence, table, leaf, unread in _leaves(alias, models):
        tables[sequence][table] = None
        if unread is None:
            leaves[sequence].append(leaf)
    for sequence, parts in leaves.items():
        batches = (parts[first : first + _TABLES_AT_ONCE] for first in range(0, len(parts), _TABLES_AT_ONCE))
        if any(_have_next(alias, batch, sequence) for batch in batches):
            highest = ", ".join(f"(SELECT max(id) FROM {table})" for table in tables[sequence])  # noqa: S608 - names of models, quoted
            yield sequence, f"SELECT setval('{sequence}', greatest({highest}))"


def unreadable(alias: str, models: Iterable[type[Model]]) -> list[str]:
    """Sequences and tables of these models that `sequences_behind` leaves out, because the user may not read them."""
    return sorted({unread for *_, unread in _leaves(alias, models) if unread is not None})


def _leaves(alias: str, models: Iterable[type[Model]]) -> list[tuple[str, str, str, str | None]]:
    connection = connections[alias]
    if not is_postgresql(connection):
        return []  # SQLite also looks into the table
    pairs = zip(*numbered(models).items(), strict=True)
    names = [[connection.ops.quote_name(model._meta.db_table) for model in column] for column in pairs]
    return fetch(connection, _NUMBERED, names or [[], []])


def _have_next(alias: str, tables: Iterable[str], sequence: str) -> bool:
    """Is the next id of the sequence, or a higher one, in one of these tables?"""
    statement = "SELECT " + " OR ".join(_HAS_NEXT.format(table=table, sequence=sequence) for table in tables)
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        # Without statistics, as after a restore, the planner would read the table instead of an index.
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(statement)
        return bool(cursor.fetchone()[0])


def without_identity(alias: str, model: type[Model]) -> list[str]:
    """The partitions whose rows cannot be updated or deleted while they are published, for example FOR ALL TABLES."""
    connection = connections[alias]
    if not is_postgresql(connection):
        return []
    return [name for (name,) in fetch(connection, _WITHOUT_IDENTITY, [connection.ops.quote_name(model._meta.db_table)])]


def changed_collation(alias: str) -> tuple[str, str, str] | None:
    """The name of the database, the version of its collation, and that of the server's, if they differ.

    PostgreSQL 14 does not store it: None.
    """
    connection = connections[alias]
    if not is_postgresql(connection):
        return None
    if fetch(connection, "SELECT current_setting('server_version_num')::int")[0][0] < _HAS_COLLATION_VERSIONS:
        return None
    changed = (
        "SELECT datname, datcollversion, pg_database_collation_actual_version(oid) FROM pg_database "
        "WHERE datname = current_database() AND datcollversion <> pg_database_collation_actual_version(oid)"
    )
    return next(iter(fetch(connection, changed)), None)

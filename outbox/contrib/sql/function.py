"""`outbox_publish()`: `publish()` as a function of PostgreSQL, for triggers, batch jobs and other languages.

It writes the row that `publish()` writes, in its caller's transaction and with its caller's rights. Its text is `publish.sql`.
What it must know is filled in when it is installed: the schema in which the tables are found then, so that a later caller's
`search_path` does not matter, and two settings, `BODY_LIMIT_BYTES` and `TRAIL`. Functions and operators are PostgreSQL's own,
because the function has a `search_path` of its own.

The migration installs it, and every later `migrate` installs it again if it differs. It never replaces a later version, so a
`migrate` of an old release during a rolling deploy does no harm.
"""

import re
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, connections, router, transaction
from django.db.migrations.recorder import MigrationRecorder

from exactly_once.packages import label_of
from exactly_once.sql.connections import execute, fetch, is_postgresql
from outbox.conf import outbox_options
from outbox.models import OutboxMessage, TrailEntry, UniqueMessage
from outbox.store.dialect import HISTORY, LIVE_PART, TABLE
from outbox.store.writing import ORDER_SPACE

VERSION = 3
"""Of `publish.sql`. A change of it increments this number. A parameter keeps its name and its type."""
NAME = TABLE.removesuffix("outboxmessage") + "publish"

_TEXT = Path(__file__).with_name("publish.sql").read_text(encoding="utf-8")
_QUOTES = "$publish$"
_VERSION = re.compile(r"publish\(\) of django-exactly-once, version (\d+)\.")
_PLACE = (
    "SELECT quote_ident(nspname), pg_get_serial_sequence(%s, 'id') FROM pg_class c "
    "JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = to_regclass(%s)"
)
_INSTALLED = (
    "SELECT oid::regprocedure::text, prosrc FROM pg_proc "
    "WHERE proname = %s AND pronamespace = (SELECT relnamespace FROM pg_class WHERE oid = to_regclass(%s))"
)


def install(alias: str) -> None:
    """Install this version in the schema of the outbox. It does nothing on SQLite, or if a later version is installed."""
    if not _has_outbox(alias) or not (statement := _statement(alias)):
        return
    connection, source = connections[alias], _source(statement)
    installed = _installed(alias)
    if any(_version(text) > VERSION for text in installed.values()) or source in installed.values():
        return
    with transaction.atomic(using=alias):
        execute(connection, statement)
        for other, text in _installed(alias).items():
            if text != source:  # an earlier version with other parameters
                execute(connection, f"DROP FUNCTION {other}")


def remove(alias: str) -> None:
    """Drop the function, whatever its version."""
    for function in _installed(alias) if _has_outbox(alias) else ():
        execute(connections[alias], f"DROP FUNCTION {function}")


def refresh(*, using: str, plan: object = None, **signal: Any) -> None:
    """After every `migrate`, but not after a `flush`: install the function where the migration has been applied."""
    if plan is not None and _has_outbox(using) and _is_applied(using):
        install(using)


def why_outdated(alias: str) -> str:
    """Why the installed function is not that of this code and its settings; "" if it is, or is of a later version."""
    try:
        if not (_has_outbox(alias) and _is_applied(alias) and (statement := _statement(alias))):
            return ""
        texts = _installed(alias).values()
    except (
        DatabaseError,
        InterfaceError,
        ImproperlyConfigured,
    ):  # unavailable, or invalid options, which another check reports
        return ""
    if not texts:
        return "does not exist"
    if _source(statement) in texts or (version := max(map(_version, texts))) > VERSION:
        return ""
    if version < VERSION:
        return f"has version {version}, and this code has version {VERSION}"
    return "was installed with another schema or other settings, or changed by hand"


def _has_outbox(alias: str) -> bool:
    return is_postgresql(connections[alias]) and router.allow_migrate_model(alias, OutboxMessage)


def _is_applied(alias: str) -> bool:
    return (label_of("outbox.contrib.sql"), "0001_initial") in MigrationRecorder(connections[alias]).applied_migrations()


def _statement(alias: str) -> str:
    """The statement that creates the function; "" without the tables."""
    if not (found := fetch(connections[alias], _PLACE, [TABLE, TABLE])):
        return ""
    ((schema, sequence),) = found
    options = outbox_options()
    values = {
        "schema": schema,
        "name": NAME,
        "version": VERSION,
        "live": f"{schema}.{LIVE_PART}",
        "history": f"{schema}.{HISTORY}",
        "names": f"{schema}.{UniqueMessage._meta.db_table}",
        "trail": f"{schema}.{TrailEntry._meta.db_table}",
        "sequence": sequence,
        "order_space": ORDER_SPACE,
        "body_limit": options.BODY_LIMIT_BYTES,
        "is_recorded": str(options.TRAIL == "all").lower(),
    }
    return re.sub(r"@(\w+)@", lambda place: str(values[place[1]]), _TEXT)


def _source(statement: str) -> str:
    return statement.split(_QUOTES)[1]


def _installed(alias: str) -> dict[str, str]:
    """The functions of ours in the schema of the outbox, by signature."""
    found = fetch(connections[alias], _INSTALLED, [NAME, TABLE])
    return {signature: text for signature, text in found if _VERSION.search(text)}


def _version(text: str) -> int:
    found = _VERSION.search(text)
    return int(found[1]) if found else 0

"""The database session that handlers share, and the settings that a handler changes in it.

A worker uses one session for many messages. `SET` without LOCAL, `RESET`, `DISCARD`, `set_config(…, false)` and SQLite's
`PRAGMA` outlast the transaction and would affect other handlers' statements: read-only, another search_path, a timeout of a
millisecond. So a handler's changes are undone inside its transaction, for the last statement of the inbox and for a proxy that
shares the server's session. Then the session is ended, and the next message gets a new one. Changes outside that transaction,
under a lease or on another database, are undone by a separate statement.

Only statements through Django's cursors are detected. If a database function or a cursor of the driver changes the session, the
session is ended after the first statement that fails because of it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import suppress
from typing import Any

from django.db import DatabaseError, InterfaceError, connections, transaction

from inbox.transactions.statements import text_of

_COMMENTS = r"(?:\s|--[^\n]*\n|/\*(?:[^*]|\*(?!/))*\*/)*"
_CHANGE = rf"{_COMMENTS}(?:set\s+(?!(?:local|transaction|constraints)\b)|(?:reset|discard|pragma)\b)"
_FIRST = re.compile(_CHANGE, re.IGNORECASE)
_LATER = re.compile(f";{_CHANGE}", re.IGNORECASE)
_CALL = re.compile(r"\bset_config\s*\((?![^()]*,\s*(?:true|'t'|'true'|'on')\s*\))", re.IGNORECASE)
_NAMED = re.compile(rf"(?:^|;){_COMMENTS}set\s+(?:session\s+)?(?!local\b)([a-z_][\w.]*)\s*(?:=|to\b)", re.IGNORECASE)
_NAMED_IN_CALL = re.compile(r"\bset_config\s*\(\s*'([a-z_][\w.]*)'", re.IGNORECASE)

_RIGHTS = ("session_authorization", "role")
"""RESET ALL does not reset these. They are reset first, because permissions for other resets depend on them."""


class SessionChanges:
    """The settings that one run of a handler changes on any database. As a context, it watches the statements itself."""

    def __init__(self) -> None:
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        self._unnamed: set[str] = set()
        self._undone: set[str] = set()

    def __enter__(self) -> None:
        for alias in connections:
            connections[alias].execute_wrappers.append(self._watch)

    def __exit__(self, *exc_info: object) -> None:
        for alias in connections:
            connections[alias].execute_wrappers.remove(self._watch)

    def record(self, text: str, alias: str) -> None:
        """Record the settings that a statement changes."""
        calls = len(_CALL.findall(text)) if "set_config" in text.lower() else 0
        if changes := calls + bool(_FIRST.match(text)) + len(_LATER.findall(text)):
            named = [*_NAMED.findall(text), *(_NAMED_IN_CALL.findall(text) if calls else ())]
            self._names[alias].update(named)
            # For example SESSION CHARACTERISTICS, or a name in a parameter.
            if len(named) < changes:
                self._unnamed.add(alias)

    def undo(self, alias: str) -> None:
        """Inside the handler's transaction, as its next statement: reset the settings to the session's first values."""
        if alias not in self._names or (connection := connections[alias]).vendor != "postgresql":
            return
        self._undone.add(alias)
        names = {name.lower() for name in self._names[alias]}
        if alias in self._unnamed:
            # The session is ended next, so Django's own settings may be reset, too.
            names = {"all", *_RIGHTS}
        statements = [f"RESET {name}" for name in (*_RIGHTS, *sorted(names.difference(_RIGHTS))) if name in names]
        role = connection.settings_dict["OPTIONS"].get("assume_role")
        if role and not names.isdisjoint(_RIGHTS):
            statements.append(f"SET ROLE {connection.ops.quote_name(role)}")
        # A broken transaction refuses this and the next statement, which reports it.
        with suppress(DatabaseError, InterfaceError), transaction.atomic(using=alias), connection.cursor() as cursor:
            cursor.execute("; ".join(statements))

    def end_sessions(self) -> None:
        """Outside transactions: undo all changes that are left."""
        for alias in self._names:
            if alias not in self._undone and connections[alias].connection is not None:
                self.undo(alias)
            end_session(alias)

    def _watch(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        connection = context["connection"]
        self.record(text_of(sql, connection), connection.alias)
        return execute(sql, params, many, context)


def end_session(alias: str) -> None:
    """Close this thread's connection, unless an enclosing transaction is using it; its next use reconnects."""
    if not connections[alias].in_atomic_block:
        connections[alias].close()

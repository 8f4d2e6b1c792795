"""The database session that handlers share, and the settings that a handler changes in it.

A worker uses one session for many messages. `SET` without LOCAL, `RESET`, `DISCARD`, `set_config(…, false)` and SQLite's
`PRAGMA` outlast the transaction and would affect other handlers' statements: read-only, another search_path, a timeout of a
millisecond. So a handler's changes are undone inside its transaction, for the last statement of the inbox and for a proxy that
shares the server's session. Then the session is ended, and the next message gets a new one. Changes outside that transaction,
under a lease or on another database, are undone by a separate statement.

Only statements through Django's cursors are detected. If a database function or a cursor of the driver changes the session, the
session is ended after the first statement that fails because of it.

A handler must also close the `atomic()` blocks that it opens. Django keeps a stack of blocks for each connection, and leaving
a block leaves the topmost one. With a block left open, leaving the inbox's own block would only release a savepoint: nothing
would be committed, and all later work of this thread would be part of a transaction that never ends. So such blocks are
removed, and the handler fails.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from django.db import DatabaseError, InterfaceError, connections, transaction

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.sql.connections import ProjectsStatements, execute, has_begun
from inbox import metrics
from inbox.errors import TransactionBroken, TransactionControl
from inbox.handlers.handler import Handler

logger = escaping_logger(__name__)

_COMMENTS = r"(?:\s|--[^\n]*\n|/\*(?:[^*]|\*(?!/))*\*/)*"
_CHANGE = rf"{_COMMENTS}(?:set\s+(?!(?:local|transaction|constraints)\b)|(?:reset|discard|pragma)\b)"
_FIRST = re.compile(_CHANGE, re.IGNORECASE)
_LATER = re.compile(f";{_CHANGE}", re.IGNORECASE)
_CALL = re.compile(r"\bset_config\s*\(", re.IGNORECASE)
_IS_LOCAL = re.compile(r"(?:true|'t'|'true'|'on'|'1')(?:\s*::\s*bool(?:ean)?)?", re.IGNORECASE)
_NAMED = re.compile(rf"(?:^|;){_COMMENTS}set\s+(?:session\s+)?(?!local\b)([a-z_][\w.]*)\s*(?:=|to\b)", re.IGNORECASE)
_NAMED_IN_CALL = re.compile(r"'([a-z_][\w.]*)'", re.IGNORECASE)

# Most statements contain none of the keywords. In the others, comments, quoted text and quoted names are skipped, and each
# statement of the string is checked.
_CONTROL = re.compile(
    r"(?:begin|commit|end|abort|start\s+transaction|prepare\s+transaction|rollback(?!\s+(?:work\s+|transaction\s+)?to\b))\b",
    re.IGNORECASE,
)
_KEYWORDS = re.compile(r"\b(?:begin|commit|end|abort|start|prepare|rollback)\b", re.IGNORECASE)
# The bodies of functions and triggers contain statements.
_DEFINES = re.compile(r"\s*create\b", re.IGNORECASE)
_SKIPPED = re.compile(
    r"""/\*|--[^\n]*|\be'(?:[^'\\]|''|\\.)*'|'(?:[^']|'')*'|"(?:[^"]|"")*"|\$((?:[a-z_]\w*)?)\$.*?\$\1\$""",
    re.IGNORECASE | re.DOTALL,
)
_PART = re.compile(rf"{_SKIPPED.pattern}|[(),]", _SKIPPED.flags)
_COMMENT = re.compile(r"/\*|\*/")
_LOCKS = re.compile(r"\bfor\s+(?:(?:no\s+key\s+)?update|(?:key\s+)?share)\b", re.IGNORECASE)
_WRITES = re.compile(
    r"\s*(?:insert|update|delete|merge|truncate|copy\b.*\bfrom|with\b.*(?<!for )(?<!key )\b(?:insert|update|delete))\b",
    re.IGNORECASE | re.DOTALL,
)

_reported: set[tuple[str, str]] = set()
"""Handlers, each with a database outside of its transaction to which it has written."""

_RIGHTS = ("session_authorization", "role")
"""RESET ALL does not reset these. They are reset first, because permissions for other resets depend on them."""


class SessionChanges(ProjectsStatements):
    """The settings that one run of a handler changes on any database. As a context, it watches the statements.

    Attributes:
        names: by database, the names of the settings that are known; empty if nothing was changed.
    """

    def __init__(self) -> None:
        self.names: defaultdict[str, set[str]] = defaultdict(set)
        self._unnamed: set[str] = set()
        self._undone: set[str] = set()

    def __enter__(self) -> None:
        for alias in connections:
            connections[alias].execute_wrappers.append(self)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for alias in connections:
            connections[alias].execute_wrappers.remove(self)

    def record(self, text: str, alias: str) -> None:
        """Record the settings that a statement changes."""
        calls = _calls_for_the_session(text) if "set_config" in text.lower() else ()
        if changes := len(calls) + bool(_FIRST.match(text)) + len(_LATER.findall(text)):
            named = [*_NAMED.findall(text), *filter(None, calls)]
            self.names[alias].update(named)
            # For example SESSION CHARACTERISTICS, or a name in a parameter.
            if len(named) < changes:
                self._unnamed.add(alias)

    def undo(self, alias: str) -> None:
        """Inside the handler's transaction, as its next statement: reset the settings to the session's first values."""
        if alias not in self.names or (connection := connections[alias]).vendor != "postgresql":
            return
        self._undone.add(alias)
        names = {name.lower() for name in self.names[alias]}
        if alias in self._unnamed:
            # The session is ended next, so Django's own settings may be reset, too.
            names = {"all", *_RIGHTS}
        statements = [f"RESET {name}" for name in (*_RIGHTS, *sorted(names.difference(_RIGHTS))) if name in names]
        role = connection.settings_dict["OPTIONS"].get("assume_role")
        if role and not names.isdisjoint(_RIGHTS):
            statements.append(f"SET ROLE {connection.ops.quote_name(role)}")
        # A broken transaction refuses this and the next statement, which reports it.
        with suppress(DatabaseError, InterfaceError), transaction.atomic(using=alias):
            execute(connection, "; ".join(statements))

    def end_sessions(self) -> None:
        """Outside transactions: undo all changes that are left."""
        for alias in self.names:
            if alias not in self._undone and connections[alias].connection is not None:
                self.undo(alias)
            end_session(alias)

    def __call__(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        connection = context["connection"]
        self.record(text_of(sql, connection), connection.alias)
        return execute(sql, params, many, context)


def end_session(alias: str) -> None:
    """Close this thread's connection, unless an enclosing transaction is using it; its next use reconnects."""
    if not connections[alias].in_atomic_block:
        connections[alias].close()


class Supervision(SessionChanges):
    """The context of a handler's run in its transaction.

    It refuses SQL that begins or ends a transaction, warns about writes to other databases, and records changes of the session.

    Raises:
        TransactionBroken: the handler returned with an open block. Its writes are rolled back, here or by the caller.
    """

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler
        self._open: Sequence[tuple[Any, int, int]] = ()

    def __enter__(self) -> None:
        self._open = _open_blocks()
        for connection, *_ in self._open:
            connection.execute_wrappers.append(self if connection.alias == self._handler.using else self._watch_beside)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for connection, *_ in self._open:
            connection.execute_wrappers.remove(self if connection.alias == self._handler.using else self._watch_beside)
        _close_left_open(self._open, error)
        if self.names and error is None:
            self.undo(self._handler.using)

    def __call__(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        connection, handler = context["connection"], self._handler
        text = text_of(sql, connection)
        if statement := controls_transaction(text, connection):
            raise TransactionControl(
                f"The handler {handler.name} executed {statement.strip()[:40]!r}. Its effect and its inbox row must "
                "commit together: remove the statement, and use `transaction.atomic()` for savepoints."
            )
        self.record(text, connection.alias)
        if not metrics.LOCKING_SECONDS.is_attached or not locks(text):
            return execute(sql, params, many, context)
        began_at = monotonic()
        try:
            return execute(sql, params, many, context)
        finally:
            metrics.LOCKING_SECONDS.observe(monotonic() - began_at, handler.name)

    def _watch_beside(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        """Also statements of ours: `publish()` on another database than the handler's is a write there."""
        connection = context["connection"]
        text, alias, handler = text_of(sql, connection), connection.alias, self._handler
        if writes(text) and (handler.name, alias) not in _reported:
            _reported.add((handler.name, alias))
            logger.warning(
                "%s: the handler writes to the database %r, outside its transaction on %r. This write may happen twice, or "
                "without the other effects. If it is the only effect, set using=%r. If not, publish a message on %r and write "
                "in a handler of that message with using=%r. This is reported once.",
                *(handler.name, alias, handler.using, alias, handler.using, alias),
            )
        self.record(text, alias)
        return execute(sql, params, many, context)


@contextmanager
def autocommit(alias: str) -> Iterator[None]:
    """A handler runs outside any transaction: each of its statements commits by itself. Close what it leaves open.

    Raises:
        TransactionBroken: it returned with an open block or transaction, which is rolled back: the inbox's next write would
            become part of it.
    """
    before = _open_blocks()
    try:
        yield
        _close_left_open(before, None)
    except BaseException as error:
        _close_left_open(before, error)
        with suppress(TransactionBroken):
            _refuse_left_open(alias)
        raise
    _refuse_left_open(alias)


def _refuse_left_open(alias: str) -> None:
    """Refuse an open transaction, including one that Django does not know."""
    connection = connections[alias]
    in_a_test_case = connection.in_atomic_block
    if connection.connection is None or in_a_test_case:
        return
    if not connection.autocommit or has_begun(connection):
        abandon(connection)
        raise TransactionBroken(
            "The handler returned with an open transaction, so its writes in it were rolled back. Use "
            "`with transaction.atomic():`."
        )


def _open_blocks() -> list[tuple[Any, int, int]]:
    """The connections of this thread, each with the number of its open blocks and savepoints."""
    return [(connection, len(connection.atomic_blocks), len(connection.savepoint_ids)) for connection in connections.all()]


def _close_left_open(before: Sequence[tuple[Any, int, int]], error: BaseException | None) -> None:
    left_open = []
    for connection, blocks, savepoints in before:
        # A handler that times out inside atomic() may leave only one of the two, or only the flag.
        higher = len(connection.atomic_blocks) > blocks or len(connection.savepoint_ids) > savepoints
        if not higher and (blocks or not connection.in_atomic_block):
            continue
        left_open.append(connection.alias)
        if blocks:
            # The caller rolls back the enclosing block, including this one.
            del connection.atomic_blocks[blocks:], connection.savepoint_ids[savepoints:]
        else:
            abandon(connection)
    if left_open and error is None:
        raise TransactionBroken(
            f"The handler returned with an open transaction on {', '.join(map(repr, left_open))}, so its writes in it were "
            "rolled back. Use `with transaction.atomic():`."
        )


def abandon(connection: Any) -> None:
    """Close a connection and any transaction that it is in; its next use reconnects."""
    connection.in_atomic_block = False
    connection.atomic_blocks, connection.savepoint_ids = [], []
    connection.close()
    # Django keeps the driver's connection if it was closed inside a transaction, which would then never end.
    connection.connection = None


def writes(text: str) -> bool:
    """Is this a statement that writes? Functions that write are not known."""
    return _WRITES.match(text) is not None


def locks(text: str) -> bool:
    """Is this a statement that locks rows?"""
    return writes(text) or _LOCKS.search(text) is not None


def controls_transaction(statement: object, connection: Any) -> str:
    """The text of `statement`, in any driver's form, if it begins, ends or prepares a transaction; else ""."""
    text = text_of(statement, connection)
    if not _KEYWORDS.search(text):
        return ""
    first, *others = _bare(text, nested=connection.vendor == "postgresql").split(";")
    statements = [first] if _DEFINES.match(first) else [first, *others]
    return text if any(_CONTROL.match(one.lstrip()) for one in statements) else ""


def text_of(statement: object, connection: Any) -> str:
    """The text of `statement`, in any driver's form."""
    if isinstance(statement, bytes):
        return statement.decode("latin-1")
    # psycopg composes statements from parts.
    as_string = getattr(statement, "as_string", None)
    return str(as_string(connection.connection) if as_string else statement)


def _bare(text: str, *, nested: bool) -> str:
    """`text` without comments, quoted text and quoted names."""
    pieces, at = [], 0
    while found := _SKIPPED.search(text, at):
        pieces.append(text[at : found.start()])
        at = _end_of_comment(text, found.end(), nested=nested) if found.group() == "/*" else found.end()
    return " ".join([*pieces, text[at:]])


@lru_cache(maxsize=32)
def _calls_for_the_session(text: str) -> Sequence[str]:
    """Of each call of set_config that changes more than the transaction, the name of the setting; "" if it is not a literal."""
    calls: list[str] = []
    for call in _CALL.finditer(text):
        name, *others = _arguments(text, call.end())
        if not (others and _IS_LOCAL.fullmatch(others[-1])):
            literal = _NAMED_IN_CALL.fullmatch(name)
            calls.append(literal[1] if literal else "")
    return calls


def _arguments(text: str, at: int) -> list[str]:
    """The arguments of the call whose first one begins there. There may be parentheses and quoted text in each."""
    arguments, begin, depth = [], at, 1
    while depth and (part := _PART.search(text, at)):
        at = _end_of_comment(text, part.end(), nested=True) if part.group() == "/*" else part.end()
        depth += {"(": 1, ")": -1}.get(part.group(), 0)
        if depth == 0 or (depth == 1 and part.group() == ","):
            arguments.append(text[begin : part.start()].strip())
            begin = at
    return arguments or [""]


def _end_of_comment(text: str, at: int, *, nested: bool) -> int:
    depth = 1
    for found in _COMMENT.finditer(text, at):
        if found.group() == "*/":
            depth -= 1
        elif nested:
            depth += 1
        if not depth:
            return found.end()
    return len(text)

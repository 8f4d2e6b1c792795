"""One handler's transaction: inbox rows, effects and commit sentinel, committed together.

A handler that ends the transaction, or leaves it unable to commit, is detected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from django.db import DatabaseError, InterfaceError, connections, transaction

from exactly_once.process.clock import monotonic
from exactly_once.sql.connections import is_outermost, is_postgresql
from exactly_once.wire.context import Cause, caused_by
from exactly_once.wire.envelope import Envelope
from exactly_once.wire.text import describe
from inbox import metrics
from inbox.errors import TransactionBroken, TransactionControl, TransactionEnded
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.store import sentinel
from inbox.store.rows import ABANDONED, Guard
from inbox.transactions.atomic_guard import NoneLeftOpen
from inbox.transactions.observed import observed
from inbox.transactions.persistence import statements_of_ours
from inbox.transactions.sessions import SessionChanges
from inbox.transactions.statements import controls_transaction, locks, text_of, writes

logger = logging.getLogger(__name__)

_reported: set[tuple[str, str]] = set()
"""Handlers, each with a database outside of its transaction to which it has written."""


def in_transaction(
    handler: Handler,
    begin: Callable[[], Guard | None],
    run: Callable[[], object],
    *,
    of: str,
    attempt: int = 1,
    durable: bool = True,
    encode_result: Callable[[object], str | None] | None = None,
) -> bool:
    """Execute `begin`, `run` and the sentinel in one transaction, and commit it; `of` names its messages in the log.

    Args:
        durable: refuse to run as a savepoint in a transaction of the caller.
        encode_result: converts the result of `run` to the JSON that is stored with the row; None, if it cannot be that.

    False: `begin` found nothing to do.
    """
    committed = proved = False
    guard: Guard | None = None
    changes = SessionChanges()

    def mark() -> None:
        nonlocal committed
        committed = True

    connection = connections[handler.using]
    with statements_of_ours:
        connection.ensure_connection()
    try:
        with transaction.atomic(using=handler.using, durable=durable):
            # The first hook of this transaction: it runs even if a later hook raises.
            connection.on_commit(mark)
            with statements_of_ours:
                if handler.collects_for and is_postgresql(connection) and is_outermost(connection):
                    # Runs share pages of their indexes, so SERIALIZABLE would fail nearly all that are collected together.
                    with connection.cursor() as cursor:
                        cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                guard = _begun(handler, begin)
            if guard is None:
                return False
            try:
                with _Supervision(handler, changes), NoneLeftOpen():
                    returned = run()
                result = encode_result(returned) if encode_result else None
            except BaseException:
                sentinel.refuse_if_ended(guard)
                raise
            changes.undo(handler.using)
            commits = sentinel.can_commit(guard, result)
            try:
                sentinel.finish(guard, attempt, result, commit=commits)
            except BaseException as error:
                # Unless the proof has failed, the answer that did not arrive may be that of the commit.
                proved = commits and not isinstance(error, TransactionBroken | TransactionEnded)
                raise
            proved = True
        refuse_if_uncommitted(handler.using, committed)
    except BaseException as error:
        if not committed:
            # After the proof, committed rows can only mean that the answer to our own commit was lost.
            if guard is not None and not proved and _committed_by_itself(handler, guard, of):
                raise TransactionEnded(ABANDONED, is_stored=True) from error
            raise
        logger.exception("%s: an on_commit hook failed after the commit of %s; it is not rerun.", handler.name, of)
    finally:
        changes.end_sessions()
    return True


def _begun(handler: Handler, begin: Callable[[], Guard | None]) -> Guard | None:
    """What `begin` returns; it waits for other transactions that handle the same message."""
    if not metrics.BEGIN_SECONDS.is_attached:
        return begin()
    began_at, outcome = monotonic(), "deferred"
    try:
        guard = begin()
        outcome = "duplicate" if guard is None else "begun"
        return guard
    finally:
        metrics.BEGIN_SECONDS.observe(monotonic() - began_at, handler.name, outcome)


def _committed_by_itself(handler: Handler, guard: Guard, of: str) -> bool:
    """Has the handler itself committed the transaction? Then its rows are dead letters now."""
    try:
        return sentinel.dead_letter_if_committed(guard)
    except (DatabaseError, InterfaceError) as error:
        logger.debug("%s: it is unknown whether the handler committed %s by itself: %s", handler.name, of, describe(error))
        return False


def call(handler: Handler, message: Message, envelope: Envelope) -> object:
    """Run the handler for one message, recorded as the cause of all messages that it publishes; returns its result."""
    cause = Cause(
        message_id=message.id,
        correlation_id=message.correlation_id or message.id,
        traceparent=envelope.traceparent,
    )
    with caused_by(cause), observed(handler, envelope):
        return handler.call(message)


def refuse_if_uncommitted(alias: str, committed: bool) -> None:
    """Raise if autocommit is off on this connection: then leaving atomic() commits nothing."""
    if not committed and not connections[alias].in_atomic_block:  # a test's transaction is still open
        connections[alias].close()
        raise TransactionBroken("The transaction ended without a commit: autocommit is off on this connection.")


class _Supervision:
    """Refuse SQL of the handler that begins or ends a transaction, warn about writes to other databases, record changes."""

    def __init__(self, handler: Handler, changes: SessionChanges) -> None:
        self._handler, self._changes = handler, changes
        self._watched: list[tuple[list[Any], Any]] = []

    def __enter__(self) -> None:
        handler = self._handler
        # First, because it may fail while there is nothing to undo.
        if handler.timeout is not None and connections[handler.using].vendor == "postgresql":
            with connections[handler.using].cursor() as cursor:
                cursor.execute(f"SET LOCAL statement_timeout = {int(handler.timeout.total_seconds() * 1000)}")
        for alias in connections:
            connection = connections[alias]
            watch = self._refuse_transaction_control if alias == handler.using else self._warn_of_writes
            connection.execute_wrappers.append(watch)
            self._watched.append((connection.execute_wrappers, watch))

    def __exit__(self, *exc_info: object) -> None:
        for wrappers, watch in self._watched:
            wrappers.remove(watch)

    def _refuse_transaction_control(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        connection = context["connection"]
        text = text_of(sql, connection)
        if statement := controls_transaction(text, connection):
            raise TransactionControl(
                f"The handler {self._handler.name} executed {statement.strip()[:40]!r}. Its effect and its inbox row must "
                "commit together: remove the statement, and use `transaction.atomic()` for savepoints."
            )
        self._changes.record(text, connection.alias)
        if not metrics.LOCKING_SECONDS.is_attached or not locks(text):
            return execute(sql, params, many, context)
        began_at = monotonic()
        try:
            return execute(sql, params, many, context)
        finally:
            metrics.LOCKING_SECONDS.observe(monotonic() - began_at, self._handler.name)

    def _warn_of_writes(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        connection = context["connection"]
        text = text_of(sql, connection)
        write = self._handler.name, connection.alias
        if writes(text) and write not in _reported:
            _reported.add(write)
            logger.warning(
                "%s: the handler writes to the database %r, outside its transaction on %r. This write may happen twice, or "
                "without the other effects. If it is the only effect, set using=%r. If not, publish a message on %r and write "
                "in a handler of that message with using=%r. This is reported once.",
                *(*write, self._handler.using, connection.alias, self._handler.using, connection.alias),
            )
        self._changes.record(text, connection.alias)
        return execute(sql, params, many, context)

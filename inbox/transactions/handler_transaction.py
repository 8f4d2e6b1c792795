"""One handler's transaction: inbox rows, effects and commit sentinel, committed together.

A handler can neither end the transaction by SQL nor leave it broken unnoticed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from django.db import DatabaseError, InterfaceError, connections, transaction

from inbox.errors import TransactionBroken, TransactionControl, TransactionEnded
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.store import sentinel
from inbox.store.rows import ABANDONED, Guard
from inbox.transactions.atomic_guard import none_left_open
from inbox.transactions.observed import observed
from inbox.transactions.persistence import statements_of_ours
from inbox.transactions.sessions import SessionChanges
from inbox.transactions.statements import controls_transaction
from outbox.kernel.context import Cause, caused_by
from outbox.kernel.envelope import Envelope
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)

_WRITES = re.compile(r"\s*(insert|update|delete|merge|truncate)\b", re.IGNORECASE)


def in_transaction(
    handler: Handler,
    begin: Callable[[], Guard | None],
    run: Callable[[], object],
    *,
    of: str,
    attempt: int = 1,
    durable: bool = True,
    remember: Callable[[object], str | None] | None = None,
) -> bool:
    """Execute `begin`, `run` and the sentinel in one transaction, and commit it; `of` names its messages in the log.

    Args:
        durable: it must be a separate transaction, not a savepoint of the caller's.
        remember: converts the result of `run` to the JSON that is stored with the row.

    False: `begin` found nothing to do.
    """
    committed = proved = False
    guard: Guard | None = None
    changes = SessionChanges()

    def mark() -> None:
        nonlocal committed
        committed = True

    with statements_of_ours():
        connections[handler.using].ensure_connection()
    try:
        with transaction.atomic(using=handler.using, durable=durable):
            # The first hook of this transaction: even if a later one raises, the effect is committed.
            transaction.on_commit(mark, using=handler.using)
            with statements_of_ours():
                guard = begin()
            if guard is None:
                return False
            try:
                with _Supervision(handler), changes, none_left_open():
                    returned = run()
                result = remember(returned) if remember else None
            except BaseException:
                sentinel.refuse_if_ended(guard)
                raise
            changes.undo(handler.using)
            sentinel.finish(guard, attempt, result)
            proved = True
        refuse_if_uncommitted(handler.using, committed)
    except BaseException as error:
        if not committed:
            # After the proof, only our own commit can have made the rows visible: its answer was lost.
            if guard is not None and not proved and _is_dead_lettered(guard):
                raise TransactionEnded(ABANDONED, is_stored=True) from error
            raise
        logger.exception("An on_commit hook of %s failed after the effect of %s was committed.", handler.name, of)
    finally:
        changes.end_sessions()
    return True


def _is_dead_lettered(guard: Guard) -> bool:
    """Did the handler commit by itself, with rows in state `done`? They are dead letters now."""
    try:
        return sentinel.dead_letter_if_committed(guard)
    except (DatabaseError, InterfaceError) as error:
        logger.debug("It is not known whether a handler that failed had committed by itself: %s", describe(error))
        return False


def call(handler: Handler, message: Message, envelope: Envelope) -> object:
    """Run the handler for one message, the cause of all that it publishes; returns the handler's result."""
    cause = Cause(
        message_id=message.id,
        correlation_id=message.correlation_id or message.id,
        traceparent=envelope.traceparent,
    )
    with caused_by(cause), observed(handler, envelope):
        return handler.call(message)


def refuse_if_uncommitted(alias: str, committed: bool) -> None:
    """Raise if autocommit was switched off on this connection: then leaving atomic() commits nothing."""
    if not committed and not connections[alias].in_atomic_block:  # as it still is in the transaction of a test
        connections[alias].close()
        raise TransactionBroken("The transaction ended without a commit: autocommit is off on this connection.")


class _Supervision:
    """Keep the handler from ending our transaction by SQL, and warn about writes outside it."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._watched: list[tuple[list[Any], Any]] = []

    def __enter__(self) -> None:
        handler = self._handler
        # First, because it may fail: then there is nothing to undo.
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
        if statement := controls_transaction(sql, context["connection"]):
            raise TransactionControl(
                f"The handler {self._handler.name} executed {statement.strip()[:40]!r}. Its effect and its inbox row must "
                "commit together: leave commit and rollback to the inbox, and use `transaction.atomic()` for savepoints."
            )
        return execute(sql, params, many, context)

    def _warn_of_writes(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        if isinstance(sql, str) and _WRITES.match(sql):
            logger.warning(
                "The handler %s writes to the database %r. That is outside its transaction on %r and may happen twice.",
                self._handler.name,
                context["connection"].alias,
                self._handler.using,
            )
        return execute(sql, params, many, context)

"""The handler's transaction, and what keeps it whole.

Inbox row, effect and commit sentinel in one transaction; the same again at once when it collided with another; an outage told
from a failure. A handler can neither end the transaction by SQL nor leave it broken unnoticed.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from django.db import DatabaseError, InterfaceError, connections, transaction

from inbox import store
from inbox.blocks import none_left_open
from inbox.errors import TransactionBroken, TransactionControl
from inbox.handlers import Handler, Message
from inbox.statements import controls_transaction
from inbox.store import Guard
from outbox.kernel.context import Cause, caused_by
from outbox.kernel.databases import drop_unusable_connections
from outbox.kernel.envelope import Envelope
from outbox.kernel.faults import is_collision, is_outage

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

TRIES_AT_ONCE = 5
_WRITES = re.compile(r"\s*(insert|update|delete|merge|truncate)\b", re.IGNORECASE)


class DatabaseAway(Exception):
    """The handler's database does not answer. Nothing was decided: do not acknowledge, wait, and receive again.

    Attributes:
        owed: what to do when it is back: give back an attempt that was counted and could not be made.
    """

    owed: Callable[[], None] | None = None


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
    """Inbox rows, effects and sentinel in one transaction: `begin`, `run`, the sentinel, commit; `of` tells people of what.

    Args:
        durable: it must be a transaction of its own, and no savepoint of its caller's.
        remember: makes of what `run` returned the JSON that stays with the row.

    False: `begin` found nothing to do.
    """
    committed = False

    def mark() -> None:
        nonlocal committed
        committed = True

    try:
        with transaction.atomic(using=handler.using, durable=durable):
            # The first hook of this transaction: whatever a later one raises, the effect is in.
            transaction.on_commit(mark, using=handler.using)
            guard = begin()
            if guard is None:
                return False
            try:
                with _Supervision(handler), none_left_open():
                    returned = run()
                result = remember(returned) if remember else None
            except BaseException:
                store.refuse_if_ended(guard)
                raise
            store.finish(guard, attempt, result)
        refuse_if_uncommitted(handler.using, committed)
    except BaseException:
        if not committed:
            raise
        logger.exception("An on_commit hook of %s failed after the effect of %s was committed.", handler.name, of)
    return True


def call(handler: Handler, message: Message, envelope: Envelope) -> object:
    """Run the handler for one message; what it publishes is told to have been caused by that. What it returned."""
    cause = Cause(
        message_id=message.id,
        correlation_id=message.correlation_id or message.id,
        traceparent=envelope.traceparent,
    )
    with caused_by(cause):
        return handler.call(message)


def refuse_if_uncommitted(alias: str, committed: bool) -> None:
    """Somebody has switched autocommit off on this connection, and then leaving atomic() commits nothing."""
    if not committed and not connections[alias].in_atomic_block:  # as it still is in the transaction of a test
        connections[alias].close()
        raise TransactionBroken("The transaction ended without a commit: autocommit is off on this connection.")


class _Supervision:
    """Keep the handler from ending our transaction by SQL, and warn about writes that are not in it."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._watched: list[tuple[list[Any], Any]] = []

    def __enter__(self) -> None:
        handler = self._handler
        # First, because it may fail: then nothing has been begun that must be ended.
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


def persistently(alias: str, attempt: Callable[[], _T]) -> _T:
    """Run a transaction again at once when it collided with another or lost its connection, a few times.

    Raises:
        DatabaseAway: the connection was lost and the database does not answer.
        Exception: what the transaction raised, or what it raised at the last try.
    """
    drop_unusable_connections()
    for tries_left in reversed(range(TRIES_AT_ONCE)):
        try:
            return attempt()
        except Exception as error:
            lost = is_outage(error)
            if lost and not store.is_reachable(alias):
                raise DatabaseAway(str(error)) from error
            if not tries_left or not (lost or is_collision(error)):
                raise
        time.sleep(random.uniform(0, 0.02 * (TRIES_AT_ONCE - tries_left)))
    raise AssertionError("unreachable")


def decided(write: Callable[[], _T], alias: str) -> _T:
    """Write an outcome in a commit of its own.

    Raises:
        DatabaseAway: it could not be written, so nothing is decided.
    """
    try:
        return persistently(alias, write)
    except (DatabaseError, InterfaceError) as error:
        if is_collision(error) or is_outage(error):
            raise DatabaseAway(str(error)) from error
        raise

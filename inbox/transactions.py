"""The handler's transaction, and what keeps it whole.

Inbox row, effect and commit sentinel in one transaction; the same again at once when it collided with another; an outage told
from a failure. A handler can neither end the transaction by SQL nor leave it broken unnoticed.

Who executed a statement decides what its error means. One of ours that fails, other than by a collision or by the values of its
row, fails because of the database: nothing can be stored, and nothing is decided. One of the handler's is its failed attempt.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from django.db import DatabaseError, InterfaceError, connections, transaction

from inbox import store
from inbox.blocks import none_left_open
from inbox.errors import TransactionBroken, TransactionControl
from inbox.handlers import Handler, Message
from inbox.sessions import SessionChanges, end_session
from inbox.statements import controls_transaction
from inbox.store import Guard
from outbox.database.connections import drop_unusable_connections
from outbox.database.faults import UNDEFINED_TABLE, is_about_values, is_collision, is_lost, remedy, sqlstate_of
from outbox.kernel.context import Cause, caused_by
from outbox.kernel.envelope import Envelope
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

TRIES_AT_ONCE = 5
_WRITES = re.compile(r"\s*(insert|update|delete|merge|truncate)\b", re.IGNORECASE)


class DatabaseAway(Exception):
    """The handler's database does not answer, or cannot store. Nothing was decided: do not acknowledge, wait, receive again.

    Attributes:
        remedy: what an operator does about it, or "".
        refused: it answers, and has refused to store this on two sessions; it may store other messages.
        owed: what to do when it is back: give back an attempt that was counted and could not be made.
    """

    owed: Callable[[], None] | None = None

    def __init__(self, reason: str, remedy: str = "", *, refused: bool = False) -> None:
        super().__init__(reason)
        self.remedy = remedy
        self.refused = refused


class _Unstored(Exception):
    """A statement of ours failed, and its row is not to blame. The database's error is its cause."""


@contextmanager
def _statements_of_ours() -> Iterator[None]:
    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        if is_collision(error) or is_about_values(error):
            raise
        raise _Unstored from error


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
    changes = SessionChanges()

    def mark() -> None:
        nonlocal committed
        committed = True

    with _statements_of_ours():
        connections[handler.using].ensure_connection()
    try:
        with transaction.atomic(using=handler.using, durable=durable):
            # The first hook of this transaction: whatever a later one raises, the effect is in.
            transaction.on_commit(mark, using=handler.using)
            with _statements_of_ours():
                guard = begin()
            if guard is None:
                return False
            try:
                with _Supervision(handler), changes, none_left_open():
                    returned = run()
                result = remember(returned) if remember else None
            except BaseException:
                store.refuse_if_ended(guard)
                raise
            changes.undo(handler.using)
            store.finish(guard, attempt, result)
        refuse_if_uncommitted(handler.using, committed)
    except BaseException:
        if not committed:
            raise
        logger.exception("An on_commit hook of %s failed after the effect of %s was committed.", handler.name, of)
    finally:
        changes.end_sessions()
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


def persistently(alias: str, attempt: Callable[[], _T], *, reruns: bool = True) -> _T:
    """Run a transaction again at once: a few times when it collided with another, once on a new session when its own failed it.

    A session fails when it is lost, or when a statement of ours finds it unfit: read-only since a failover, or changed by an
    earlier handler.

    Args:
        reruns: a handler that was running when its session was lost is run again, too.

    Raises:
        DatabaseAway: the database does not answer, or cannot store.
        Exception: what the transaction raised, or what it raised at the last try.
    """
    drop_unusable_connections()
    session = _Session(alias, reruns=reruns)
    collisions = 0
    while True:
        try:
            done = attempt()
        except Exception as error:
            if is_collision(error):
                collisions += 1
                if collisions == TRIES_AT_ONCE:
                    raise
            elif not session.is_replaced_after(error):
                raise
        else:
            session.report()
            return done
        time.sleep(random.uniform(0, 0.02 * (collisions + 1)))


class _Session:
    """The session of one transaction that is run `persistently`. It is replaced by a new one at most once."""

    def __init__(self, alias: str, *, reruns: bool) -> None:
        self._alias = alias
        self._reruns = reruns
        self._unfit = ""
        self._replaced = False

    def is_replaced_after(self, error: Exception) -> bool:
        """Is there a new session, on which the transaction is to be run again?

        Raises:
            DatabaseAway: there is none, or a statement of ours has failed on the new one, too.
        """
        if isinstance(error, _Unstored):
            cause = error.__cause__ or error
            reason = why_not_stored(cause, self._alias)
            if self._replaced or not store.is_reachable(self._alias):
                refused = self._replaced and not is_lost(cause)
                raise DatabaseAway(reason, remedy(cause, self._alias), refused=refused) from cause
            self._unfit = "" if is_lost(cause) else reason
        elif is_lost(error):
            if not store.is_reachable(self._alias):
                raise DatabaseAway(describe(error)) from error
            if self._replaced or not self._reruns:
                return False
        else:
            if _may_be_of_its_session(error):
                end_session(self._alias)
            return False
        self._replaced = True
        return True

    def report(self) -> None:
        """The transaction has succeeded. On a second session, an operator should know what was wrong with the first."""
        if self._unfit:
            logger.warning(
                "A session of the database %r could not store and was replaced by a new one, which could: %s. If a handler had "
                "changed it, use SET LOCAL there.",
                self._alias,
                self._unfit,
            )


def _may_be_of_its_session(error: BaseException) -> bool:
    """Has a statement failed that the values in it do not explain? What an earlier handler left in the session may."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, DatabaseError | InterfaceError):
            return not is_about_values(link)
        link = link.__cause__ or link.__context__
    return False


def why_not_stored(error: BaseException, alias: str) -> str:
    """Why nothing can be stored. Of a table that is not found, with the path on which it was looked for."""
    reason = describe(error)
    if sqlstate_of(error) == UNDEFINED_TABLE:
        with suppress(DatabaseError, InterfaceError), connections[alias].cursor() as cursor:
            cursor.execute("SHOW search_path")
            reason += f" (the search_path of this session is {cursor.fetchone()[0]})"
    return reason


def decided(write: Callable[[], _T], alias: str) -> _T:
    """Write an outcome in a commit of its own.

    Raises:
        DatabaseAway: it could not be written, so nothing is decided.
        django.db.Error: the values of its row are to blame.
    """

    def attempt() -> _T:
        with _statements_of_ours():
            return write()

    try:
        return persistently(alias, attempt)
    except (DatabaseError, InterfaceError) as error:
        if is_collision(error):
            raise DatabaseAway(describe(error)) from error
        raise

"""Running transactions of the inbox: that of a handler, and those that store an outcome.

The transaction of a handler contains inbox rows, effects and the commit sentinel, which are committed together. A handler that
ends it, or leaves it unable to commit, is detected.

A transaction is rerun after a collision, and once on a new session; then the database counts as unavailable. The meaning of an
error depends on whose statement failed. If it is a statement of the handler, the attempt fails. If it is a statement of the
inbox, and neither a collision nor the values of its row are the cause, then the database cannot store, and nothing is decided;
nor if `publish()` draws an id that exists, from a sequence that is behind its table.
"""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from django.db import DatabaseError, InterfaceError, connections, transaction

from exactly_once.failures import RAN_FOR
from exactly_once.process import work
from exactly_once.process.clock import monotonic, utcnow
from exactly_once.process.logs import escaping_logger
from exactly_once.sql.connections import READ_COMMITTED, drop_unusable_connections, execute, is_outermost, is_postgresql
from exactly_once.sql.faults import (
    UNDEFINED_TABLE,
    alias_of,
    is_about_values,
    is_collision,
    is_lost,
    is_outage_of_its_server,
    remedy,
    sqlstate_of,
)
from exactly_once.sql.prepared_statements import Rows
from exactly_once.sql.schema import is_missing, is_number_taken
from exactly_once.telemetry import tracing
from exactly_once.telemetry.tracing import Cause, handled
from exactly_once.transport import broker
from exactly_once.wire.envelope import Envelope
from exactly_once.wire.text import describe
from inbox import metrics
from inbox.conf import inbox_options
from inbox.errors import RetryLater, TransactionBroken, TransactionEnded
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.store import dialect, sentinel
from inbox.store.message_rows import ABANDONED, Failure, Guard, Next
from inbox.transactions.sessions import SessionChanges, Supervision, end_session

logger = escaping_logger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

_Fail = Callable[[Guard, BaseException], Failure | None]

TRIES_AT_ONCE = 5


class DatabaseUnavailable(Exception):
    """A database of the handler does not answer, or cannot store. Nothing was decided: do not acknowledge, wait, receive again.

    Attributes:
        remedy: the operator's remedy, or "".
        refused: it answers, but has refused to store this on two sessions; it may store other messages.
        beside: the alias of another database, which the handler uses and which does not answer; "" if it is the handler's own.
    """

    def __init__(self, reason: str, remedy: str = "", *, refused: bool = False, beside: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy
        self.refused = refused
        self.beside = beside


class Failed(Exception):
    """The handler failed, and its failure is stored and committed. `__cause__` is its error."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


class _Unstored(Exception):
    """A statement of the inbox failed for a reason other than its row. `__cause__` is the database's error."""


class _StatementsOfOurs(AbstractContextManager[object]):
    """A context of statements of the inbox, not of a handler."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, DatabaseError | InterfaceError):
            return
        if is_missing(error) or not (is_collision(error) or is_about_values(error)):
            raise _Unstored from error


statements_of_ours = _StatementsOfOurs()


def run_with_reruns(alias: str, attempt: Callable[[], _T], *, reruns: bool = True) -> _T:
    """Run a transaction; rerun it at once a few times after a collision, and once on a new session if its session fails.

    A session fails if it is lost, or if a statement of the inbox finds it unfit: read-only since a failover, or changed by an
    earlier handler.

    Args:
        reruns: also rerun a handler that was running when its session was lost.

    Raises:
        DatabaseUnavailable: the database does not answer, or cannot store.
        Exception: the transaction's error, at its last try.
    """
    drop_unusable_connections(unchecked=alias)
    unfit: str | None = None
    collisions = 0
    while True:
        try:
            done = attempt()
        except Failed as failed:
            _end_session_if_unfit(failed, alias)
            raise
        except Exception as error:
            if is_collision(error):
                collisions += 1
                if collisions == TRIES_AT_ONCE:
                    raise
            else:
                unfit = _why_unfit(error, alias, is_new=unfit is not None, reruns=reruns)
                if unfit is None:
                    raise
        else:
            if unfit:
                logger.warning(
                    "inbox: a session of the database %r could not store and was replaced by a new one: %s. If a handler had "
                    "changed the session, use SET LOCAL in that handler.",
                    alias,
                    unfit,
                )
            return done
        time.sleep(random.uniform(0, 0.02 * (collisions + 1)))


def _why_unfit(error: Exception, alias: str, *, is_new: bool, reruns: bool) -> str | None:
    """Why to rerun the transaction on a new session; "" if this one is lost. None: it is not to be rerun.

    Args:
        is_new: this session has replaced another one, and is not replaced in turn.

    Raises:
        DatabaseUnavailable: a second session cannot be opened, or a statement of the inbox failed on it, too.
    """
    if isinstance(error, _Unstored):
        cause = error.__cause__ or error
        reason = why_not_stored(cause, alias)
        if is_new or not dialect.is_reachable(alias):
            raise DatabaseUnavailable(reason, remedy(cause, alias), refused=is_new and not is_lost(cause)) from cause
        return "" if is_lost(cause) else reason
    if outage := outage_in(error, alias):
        raise outage from error
    if is_lost(error):
        return None if is_new or not reruns else ""
    _end_session_if_unfit(error, alias)
    return None


def outage_in(error: BaseException, alias: str) -> DatabaseUnavailable | None:
    """The outage, if the error of a handler only says that a database does not answer, or has no free id for what it publishes.

    A database beside the handler's own is unavailable, too, if it answers and has no disk left: there the inbox does not find
    out by itself. A session that is lost while its server answers may have been ended by the handler's own statement.
    """
    if is_number_taken(error) or (is_lost(error) and not dialect.is_reachable(alias)):
        return DatabaseUnavailable(describe(error))
    beside = alias_of(error) if is_outage_of_its_server(error) else ""
    # An alias may be that of a tenant, and known only while its handler runs.
    if beside == alias or beside not in connections or connections[beside].in_atomic_block:
        return None
    if is_lost(error) and dialect.is_reachable(beside):
        return None
    return DatabaseUnavailable(describe(error), remedy(error, beside), beside=beside)


def _end_session_if_unfit(error: BaseException, alias: str) -> None:
    """If a statement failed for a reason other than its values, that may be a setting of an earlier handler."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, DatabaseError | InterfaceError):
            if not is_about_values(link):
                end_session(alias)
            return
        link = link.__cause__ or link.__context__


def why_not_stored(error: BaseException, alias: str) -> str:
    """Why nothing can be stored; for a table that is not found, with the search_path."""
    reason = describe(error)
    if sqlstate_of(error) == UNDEFINED_TABLE:
        with suppress(DatabaseError, InterfaceError), connections[alias].cursor() as cursor:
            cursor.execute("SHOW search_path")
            reason += f" (the search_path of this session is {cursor.fetchone()[0]})"
    return reason


def committed(alias: str, write: Callable[Concatenate[str, _P], _T], *given: _P.args, **named: _P.kwargs) -> _T:
    """Call a function of the store, which gets the alias first, as a transaction of the inbox, in its own commit.

    Raises:
        DatabaseUnavailable: it could not be stored, so nothing is decided.
        django.db.Error: the values of its row cannot be stored.
    """

    def attempt() -> _T:
        with statements_of_ours:
            return write(alias, *given, **named)

    try:
        return run_with_reruns(alias, attempt)
    except (DatabaseError, InterfaceError) as error:
        if is_collision(error):
            raise DatabaseUnavailable(describe(error)) from error
        raise


class Following(Protocol):
    """Messages that are run one after the other, each begun by the round trip that commits the one before it."""

    def take(self, guard: Guard, changes: SessionChanges) -> Next | None:
        """What is sent with the commit of the current one; None: nothing.

        Args:
            changes: what it has changed, and is to be undone.
        """

    def begin(self, answer: Callable[[], Rows]) -> Guard | None:
        """The current one is committed. The next one becomes the current one; `answer` waits for its first statement.

        None: it is not to be run, or there is none that has begun. The transaction is empty.
        """


def in_transaction(
    handler: Handler,
    begin: Callable[[], Guard | None],
    run: Callable[[], str | None],
    *,
    of: Callable[[], str],
    durable: bool,
    fail: _Fail | None = None,
    following: Following | None = None,
) -> None:
    """Execute `begin`, `run` and the sentinel in one transaction, and commit it. If `begin` finds nothing, `run` is not called.

    Args:
        run: returns the result that is stored with the row, as JSON; None if it has none.
        of: names its messages in the log.
        durable: refuse to run as a savepoint in a transaction of the caller.
        fail: stores that the handler has failed, in its transaction, and commits; returns None if it could not.
        following: more messages, each of which may begin with the commit of the one before it. From then on everything here is
            about that one, also an error.

    Raises:
        Failed: `fail` has stored it.
    """
    committed: list[bool] = []
    proved = False
    guard: Guard | None = None
    supervision = Supervision(handler)
    connection: Any = connections[handler.using]
    if connection.connection is None:
        with statements_of_ours:
            connection.ensure_connection()
    try:
        with transaction.atomic(using=handler.using, durable=durable):
            # The first hook of this transaction: it runs even if a later hook raises.
            connection.on_commit(partial(committed.append, True))
            with statements_of_ours:
                guard = _timed(handler, begin) if metrics.BEGIN_SECONDS.is_attached else begin()
            while guard is not None:
                returned = commits = False
                try:
                    with supervision:
                        result = run()
                    returned = True
                    commits = sentinel.can_commit(guard, result)
                    taken = following.take(guard, supervision) if following is not None and commits else None
                    answer = sentinel.finish(guard, result, commit=commits, following=taken)
                    proved = True
                except BaseException as error:
                    # Unless the proof has failed, the answer that did not arrive may be that of the commit.
                    proved = commits and not isinstance(error, TransactionBroken | TransactionEnded)
                    proved = proved or _is_undone(handler, guard, error, fail, returned=returned)
                    raise
                if following is None or answer is None:
                    break
                guard, proved = None, False
                begin = partial(following.begin, answer)
                guard = _timed(handler, begin) if metrics.BEGIN_SECONDS.is_attached else begin()
                if guard is None:
                    committed.append(True)
                    connection.needs_rollback = True  # unlike a commit, it cannot fail
                supervision = Supervision(handler)
        if not committed:
            refuse_if_uncommitted(handler.using)
    except BaseException as error:
        if not committed:
            # What is left after the proof can only mean that the answer to our own commit was lost.
            is_open = guard is not None and not proved and not isinstance(error, Failed)
            if guard is not None and is_open and _committed_by_itself(handler, guard, of()):
                logger.exception("%s: the run of %s failed after the handler had committed by itself.", handler.name, of())
                raise TransactionEnded(ABANDONED, is_stored=True) from error
            raise
        logger.exception("%s: an on_commit hook failed after the commit of %s; it is not rerun.", handler.name, of())
    finally:
        supervision.end_sessions()


def _is_undone(handler: Handler, guard: Guard, error: BaseException, fail: _Fail | None, *, returned: bool) -> bool:
    """Roll back, and find that the handler has not committed by itself. False: unknown.

    Raises:
        Failed: the handler is the cause, and not a database, and `fail` has stored that.
        TransactionEnded: this is not the transaction that began.
    """
    is_ended = isinstance(error, TransactionEnded)
    if fail and not is_ended and not _is_of_a_database(error, handler.using) and (failure := fail(guard, error)):
        raise Failed(failure) from error
    if not returned:
        sentinel.refuse_if_ended(guard)
    return not is_ended and sentinel.is_rolled_back(guard)


def _is_of_a_database(error: BaseException, alias: str) -> bool:
    return is_collision(error) or is_lost(error) or outage_in(error, alias) is not None


def read_committed(alias: str) -> None:
    """For a transaction that collects the messages of a join, whatever the isolation level of the database.

    Runs share pages of their indexes, so SERIALIZABLE would fail nearly all that are collected together.
    """
    connection = connections[alias]
    if is_postgresql(connection) and is_outermost(connection):
        execute(connection, READ_COMMITTED)


def _timed(handler: Handler, begin: Callable[[], Guard | None]) -> Guard | None:
    """What `begin` returns; it waits for other transactions that handle the same message."""
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


def call(handler: Handler, given: Sequence[tuple[Message, Envelope]]) -> object:
    """Call the handler once, with one message or a list; returns its result.

    A single message is recorded as the cause of all messages that the handler publishes. The call is a span, and counted in the
    metrics of this process; see `telemetry.tracing` and `inbox.metrics`.
    """
    messages, envelopes = zip(*given, strict=True)
    first: Message = messages[0]
    cause = Cause(first.id, first.correlation_id or first.id, envelopes[0].traceparent) if len(given) == 1 else None
    began_at = monotonic()
    token = handled.set(cause or handled.get())
    before = work.begin("inbox", handler.using, handler.name, first.id, len(given))
    try:
        with _span(handler, envelopes) if tracing.is_recording() else nullcontext():
            result = handler.call(*messages)
    except BaseException as error:
        with suppress(AttributeError):  # of a class that has slots only
            setattr(error, RAN_FOR, monotonic() - began_at)
        raise
    else:
        if metrics.LAG.is_attached:
            _count_lag(handler, envelopes)
        return result
    finally:
        work.end(before)
        handled.reset(token)
        if metrics.HANDLER_SECONDS.is_attached:
            metrics.HANDLER_SECONDS.observe(monotonic() - began_at, handler.name)
            if handler.kind.gets_list:
                metrics.BATCH_MESSAGES.observe(len(given), handler.name)


def refuse_if_uncommitted(alias: str) -> None:
    """Raise if autocommit is off on this connection: then leaving atomic() commits nothing."""
    if not connections[alias].in_atomic_block:  # a test's transaction is still open
        connections[alias].close()
        raise TransactionBroken("The transaction ended without a commit: autocommit is off on this connection.")


def _span(handler: Handler, envelopes: Sequence[Envelope]) -> AbstractContextManager[None]:
    options = inbox_options()
    return tracing.processing(
        broker.system_of(options.broker_url),
        envelopes,
        expected=(RetryLater,),
        messaging__consumer__group__name=options.GROUP,
        exactly_once__handler=handler.name,
    )


def _count_lag(handler: Handler, envelopes: Sequence[Envelope]) -> None:
    now = utcnow()
    for envelope in envelopes:
        if (sent_at := envelope.sent_at) is not None:
            metrics.LAG.observe(max((now - sent_at).total_seconds(), 0.0), handler.name)

"""Run a handler for one stored message and roll everything back: what it would write and publish, or why it fails.

The handler runs in this process, in a thread of its own, with a time limit. Only what it does in its own database is rolled
back, so a handler under a lease is refused, and other databases refuse every write. Mail and calls over a network are real, and
so is what a handler does on connections and threads of its own, and what it commits in its own database by `commit()` of the
driver's connection.
"""

import ctypes
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import Error, connections, transaction
from django.db.backends.signals import connection_created

from exactly_once.half import WouldPublish, halves
from exactly_once.sql.connections import execute, is_postgresql, set_local
from exactly_once.wire.body import Undecodable
from exactly_once.wire.envelope import Envelope, opened
from exactly_once.wire.formats import CELERY_TOPICS
from exactly_once.wire.text import describe
from inbox.conf import inbox_options
from inbox.errors import HandlerTimeout, InboxError, Reject, RetryLater, TransactionControl
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.receiving.outcomes import failure_from, redacted
from inbox.receiving.reading import message_of, stored_envelope
from inbox.states import State
from inbox.store import receipts
from inbox.store.message_rows import Failure, business_id
from inbox.transactions.running import call
from inbox.transactions.sessions import controls_transaction, writes

RUNNABLE = (State.DEAD, State.RETRYING)
LONGEST = timedelta(seconds=30)

_TABLES_OF_OURS = re.compile(r"\b(?:outbox|inbox)_\w+")
_MOST_WRITES = 100
_WRITE_LENGTH = 2_000
_GRACE_SECONDS = 1.0
_OUTCOMES = {HandlerTimeout: "timed out", RetryLater: "deferred", Reject: "rejected", Undecodable: "rejected"}


class NotRunDry(InboxError):
    """The handler is not run, for this reason."""


@dataclass(frozen=True, kw_only=True)
class Write:
    """A statement that writes.

    Attributes:
        parameters: as text; "" for none.
    """

    sql: str
    parameters: str = ""

    def __str__(self) -> str:
        return f"{self.sql}\n-- {self.parameters}"[:_WRITE_LENGTH] if self.parameters else self.sql


@dataclass(kw_only=True)
class DryRun:
    """The result of a dry run.

    Attributes:
        outcome: "handled", "deferred", "rejected", "failed" or "timed out".
        failure: what the handler raised.
        writes: its SQL statements that write, without those of the outbox and the inbox.
        more_writes: the number of those beyond the limit.
        published: the messages that it would publish.
        hooks: the number of functions that it would run after the commit.
        read_only: the aliases of the other databases that it has connected to.
    """

    outcome: str = "handled"
    failure: Failure | None = None
    writes: list[Write] = field(default_factory=list)
    more_writes: int = 0
    published: Sequence[WouldPublish] = ()
    hooks: int = 0
    read_only: list[str] = field(default_factory=list)


def why_not(stored: InboxMessage) -> str:
    """Why a message cannot be run dry; "" if it can."""
    handler = registry.get(stored.handler)
    if stored.state not in RUNNABLE:
        return f"it is {stored.get_state_display().lower()}, and only dead and retrying messages are run dry"
    if stored.topic.startswith(CELERY_TOPICS) or handler is None:
        return "this process does not know its handler"
    return handler.kind.why_not_dry


def dry_run(alias: str, pk: int, limit: timedelta) -> DryRun:
    """Run the handler of a stored message and roll back.

    Args:
        limit: the handler is interrupted after this time.

    Raises:
        NotRunDry: it was not run.
    """
    stored = receipts.message(alias, pk).first()
    if stored is None:
        raise NotRunDry("it no longer exists")
    if reason := why_not(stored):
        raise NotRunDry(reason)
    handler = registry.get(stored.handler)
    assert handler is not None  # noqa: S101 - why_not() has looked
    if handler.using != alias:
        raise NotRunDry("its handler works on another database")
    run = _Run(handler, stored, min(limit, LONGEST))
    return run.result()


class _Run:
    """One run in a thread of its own."""

    def __init__(self, handler: Handler, stored: InboxMessage, limit: timedelta) -> None:
        # A handler's own timeout would end this process.
        self._handler = replace(handler, timeout=None)
        self._stored = stored
        self._limit = limit
        self._result = DryRun()
        self._why_not: NotRunDry | None = None
        self._over = False

    def result(self) -> DryRun:
        thread = threading.Thread(target=self._work, name="dry run", daemon=True)
        thread.start()
        thread.join(self._limit.total_seconds())
        if thread.is_alive():
            self._interrupt(thread)
            thread.join(_GRACE_SECONDS)
        if self._why_not is not None:
            raise self._why_not
        if thread.is_alive():
            # The database ends its transaction.
            return DryRun(outcome="timed out", writes=[*self._result.writes])
        return self._result

    def _interrupt(self, thread: threading.Thread) -> None:
        if not self._over:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(HandlerTimeout))

    def _work(self) -> None:
        try:
            self._run()
        except NotRunDry as refused:
            self._why_not = refused
        except BaseException as error:  # noqa: BLE001 - no exception of user code may be lost in a thread
            self._failed(error)
        finally:
            self._over = True
            for connection in connections.all(initialized_only=True):
                connection.in_atomic_block = False
                with suppress(Error):
                    connection.rollback()
            connections.close_all()

    def _run(self) -> None:
        alias = self._handler.using
        envelope = opened(stored_envelope(self._stored), inbox_options().BODY_LIMIT_BYTES)
        with transaction.atomic(using=alias, durable=True):
            self._bound(alias)
            self._lock(alias)
            publishers = [half.publisher(alias) for half in halves() if half.publisher]
            self._call(envelope)
            if is_postgresql(connections[alias]):
                connections[alias].check_constraints()  # those that a commit would check
            self._result.hooks = len(connections[alias].run_on_commit)
            self._result.published = [each for published in publishers for each in published(self._stored.message_id)]
            transaction.set_rollback(True, using=alias)

    def _call(self, envelope: Envelope) -> None:
        attempt, biz_id = self._stored.attempts + 1, business_id(self._stored.biz_id)
        message = message_of(
            self._handler, envelope, inbox_options(), needs_id=False, attempt=attempt, biz_id=biz_id, is_bounded=False
        )
        watched = [connections[alias].execute_wrappers for alias in connections]
        for wrappers in watched:
            wrappers.append(self._watch)
        try:
            with self._others_read_only():
                call(self._handler, [(message, envelope)])
        finally:
            for wrappers in watched:
                wrappers.remove(self._watch)

    def _failed(self, error: BaseException) -> None:
        outcome = next((name for kind, name in _OUTCOMES.items() if isinstance(error, kind)), "failed")
        said = f"{type(error).__name__}: {describe(error)}"
        if outcome == "timed out":
            said = f"it took longer than {self._limit.total_seconds():g} s"
        self._result.outcome = outcome
        failure = failure_from(error, error=said, retry_after=None, attempts=self._stored.attempts + 1)
        self._result.failure = redacted(failure, inbox_options())

    def _bound(self, alias: str) -> None:
        """Have PostgreSQL end the transaction of a handler that cannot be interrupted."""
        if is_postgresql(connections[alias]):
            longest = self._limit + timedelta(seconds=_GRACE_SECONDS)
            limits = set_local(statement_timeout=longest, idle_in_transaction_session_timeout=longest)
            execute(connections[alias], limits)

    @contextmanager
    def _others_read_only(self) -> Iterator[None]:
        """Have every other database that this thread connects to refuse writes, whatever the statement and the cursor."""
        thread = threading.current_thread()

        def begin(connection: Any, **_: object) -> None:
            if connection.alias == self._handler.using or threading.current_thread() is not thread:
                return
            self._result.read_only.append(connection.alias)
            if connection.vendor != "sqlite":
                # A setting of the session would reach other clients of a proxy. So this begins a transaction, as the outermost
                # atomic() does, but permits durable blocks.
                connection.set_autocommit(False)
                connection.in_atomic_block, connection.savepoint_ids = True, [None]
            if hasattr(connection.connection, "read_only"):
                # psycopg 3: also the transactions that begin after a commit() of the driver's connection.
                connection.connection.read_only = True
                connection._close = partial(_close_writable, connection)  # noqa: SLF001 - Django has no hook for it
            # Always, because a pool may wrap the driver's connection, and an attribute of that has no effect.
            execute(connection, "PRAGMA query_only = ON" if connection.vendor == "sqlite" else "SET TRANSACTION READ ONLY")
            self._bound(connection.alias)

        connection_created.connect(begin, weak=False)
        try:
            yield
        finally:
            connection_created.disconnect(begin)

    def _lock(self, alias: str) -> None:
        """Lock the row, so that no process runs the message at the same time."""
        rows = InboxMessage.objects.using(alias).filter(pk=self._stored.pk, day=self._stored.day, state=self._stored.state)
        if not rows.select_for_update(skip_locked=is_postgresql(connections[alias])).values_list("pk", flat=True):
            raise NotRunDry("a process is working on it, or its state has changed")

    def _watch(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        connection, text = context["connection"], sql if isinstance(sql, str) else str(sql)
        # Not that of Django's own BEGIN on another SQLite database.
        if connection.in_atomic_block and (statement := controls_transaction(sql, connection)):
            raise TransactionControl(
                f"The handler executed {statement.strip()[:40]!r}, which would end the dry run's transaction."
            )
        if writes(text) and not _TABLES_OF_OURS.search(text):
            if len(self._result.writes) < _MOST_WRITES:
                self._result.writes.append(_write(text, params))
            else:
                self._result.more_writes += 1
        return execute(sql, params, many, context)


def _close_writable(connection: Any) -> None:
    """Close the connection, or return it to its pool, whose next user may write."""
    if connection.connection is not None:
        with suppress(Error, connection.Database.Error):
            connection.connection.rollback()
            connection.connection.read_only = None
    type(connection)._close(connection)  # noqa: SLF001 - see above


def _write(sql: str, params: Any) -> Write:
    return Write(sql=" ".join(sql.split())[:_WRITE_LENGTH], parameters=f"{params!r}"[:_WRITE_LENGTH] if params else "")

"""Databases that cannot store messages now: one record for all consumer and runner threads of a process.

A database that does not answer, accepts no writes, or lacks a table is *unavailable*: its deliveries are neither acknowledged
nor returned to the broker, and all its handlers pause. If the database can store but one handler's message could not be stored,
only that handler pauses, unless the message can be deferred: see `consumer.reception`.

An attempt that was counted but could not be made, because its database became unavailable, is *refunded* when the database is
available again. The runner, or the next task, makes the refunds before it claims a message.

A handler may also query another database. While that one is unavailable only this handler waits, and no attempt is counted; one
of its messages at a time finds out whether it is available again.
"""

import os
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError, InterfaceError, connections, transaction

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.process.outage import Outage
from exactly_once.sql.faults import is_collision, is_lost, remedy
from exactly_once.sql.schema import behind_their_tables, is_missing, why_unmigrated
from inbox.handlers.handler import Handler
from inbox.receiving.in_hand import lost_sessions
from inbox.store.arrivals import begin_fresh
from inbox.store.dialect import LONGEST_LOCK_WAIT
from inbox.store.message_rows import ConcurrentDuplicate, NewRow
from inbox.transactions.running import DatabaseUnavailable, committed, why_not_stored
from inbox.transactions.sessions import end_session

logger = escaping_logger(__name__)

_LARGER_THAN_A_PAGE = 10_000
"""In bytes. On a full disk small rows may still fit into existing pages; this one does not."""
_SHOWN_SECONDS = 300.0
"""An outage that no message has met since is not shown for longer."""


@dataclass
class _Beside:
    """The outage of a database that is not the handler's own."""

    alias: str
    outage: Outage
    reason: str = ""
    until: float = 0.0


class Outages:
    """Called by any thread with a database connection.

    Attributes:
        items: by its description, what could not be stored while its database could store; it may have been stored since.
        beside: by handler, the outage of another database that it uses.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._databases: dict[str, Outage] = {}
        self.items: dict[str, Outage] = {}
        self.beside: dict[str, _Beside] = {}

    def is_ongoing(self, alias: str) -> bool:
        outage = self._databases.get(alias)
        return outage is not None and outage.ongoing

    def pause(self, alias: str, what: str, error: DatabaseUnavailable) -> tuple[float, bool]:
        """`what` could not be stored: how many seconds to pause it, and whether the whole database is unavailable."""
        if error.beside:
            return self.pause_handler(what, error), False
        problem = self._problem(alias)
        with self._lock:
            if problem is None:
                return self.items.setdefault(what, Outage(f"the store of {what}")).record(error, error.remedy), False
            outage = self._database(alias)
            # If several threads detect the outage, only the first extends the pause; otherwise each would count as a try.
            return 0.0 if outage.ongoing else outage.record(*problem), True

    def can_store(self, alias: str) -> bool:
        """Try to store, without changing the record."""
        return self._problem(alias) is None

    def ask(self, alias: str) -> float:
        """Try to store: seconds to pause the database, or 0 if it can store."""
        problem = self._problem(alias)
        with self._lock:
            if problem is not None:
                return self._database(alias).record(*problem)
            self._database(alias).over()
            return 0.0

    def end(self, what: str) -> None:
        """`what` has been stored."""
        if what in self.items:
            with self._lock:
                self.items[what].over()

    def pause_handler(self, handler: str, error: DatabaseUnavailable) -> float:
        """Another database that the handler uses is unavailable: how many seconds to pause the handler."""
        with self._lock:
            found = self.beside.get(handler)
            if found is None or found.alias != error.beside:
                outage = Outage(f"the database {error.beside!r}, which {handler} uses,")
                found = self.beside[handler] = _Beside(error.beside, outage)
            seconds = found.outage.record(error, error.remedy)
            found.reason, found.until = str(error), monotonic() + seconds
            return seconds

    def is_paused(self, handler: str) -> bool:
        found = self.beside.get(handler)
        return found is not None and monotonic() < found.until

    def end_beside(self, handler: str) -> None:
        """The handler has been run."""
        with self._lock:
            if found := self.beside.pop(handler, None):
                found.outage.over()

    @property
    def waits(self) -> list[str]:
        """What handlers wait for, for people."""
        shown_after = monotonic() - _SHOWN_SECONDS
        found = [(name, one) for name, one in self.beside.copy().items() if one.until > shown_after]
        return sorted(f"the database {one.alias!r} for {name}: {one.reason}" for name, one in found)

    def _database(self, alias: str) -> Outage:
        return self._databases.setdefault(alias, Outage(f"the database {alias!r}"))

    @staticmethod
    def _problem(alias: str) -> tuple[str, str] | None:
        """Why nothing can be stored, and the operator's remedy; None if the database can store."""
        try:
            _try_to_store(alias)
        except ConcurrentDuplicate:
            return "another session has locked the table of the inbox", "Wait for that session, or end it."
        except Exception as error:  # noqa: BLE001 - an error of a custom database backend must not end the worker
            if is_collision(error):
                return None
            if is_missing(error) and (behind := _sequence_behind(alias)):
                return behind
            reason = why_not_stored(error, alias)
            with suppress(DatabaseError, InterfaceError):
                end_session(alias)
            return reason, (is_missing(error) and why_unmigrated(alias, "inbox")) or remedy(error, alias)
        return _sequence_behind(alias)


def _sequence_behind(alias: str) -> tuple[str, str] | None:
    """After an outage: another server may have the rows, and not the sequences. Handlers publish, too."""
    found = behind_their_tables(alias)
    return next(((problem, f"Run `{statement}`.") for problem, statement in found), None)


def _try_to_store(alias: str) -> None:
    """Insert a row as for a delivery, on a new session, and roll it back.

    Raises:
        ConcurrentDuplicate: another session has locked the table.
        django.db.Error: nothing can be stored, for this reason.
    """
    if not connections[alias].in_atomic_block:
        connections[alias].close()
    row = NewRow(handler="", topic="", biz_id=f"trial:{uuid.uuid4()}", body=os.urandom(_LARGER_THAN_A_PAGE), digest="")
    with transaction.atomic(using=alias):
        begin_fresh(alias, [row], LONGEST_LOCK_WAIT)
        transaction.set_rollback(True, using=alias)


_refunds: defaultdict[str, deque[tuple[Any, ...]]] = defaultdict(deque)
"""By database, those that are pending. Each operation on them is atomic."""


def record_loss(handler: Handler, rows: Sequence[NewRow], outage: DatabaseUnavailable) -> None:
    """Record that a handler was being called when its database became unavailable."""
    if outage.beside or not is_lost(outage.__cause__ or outage):
        return
    lost_sessions.record(rows)
    for row in rows:
        if lost_sessions.count_against(row):
            logger.error(
                "%s: the session of the database %r was lost again while message %s (biz-id %s) was being handled. From now on "
                "each such loss counts as an attempt. Check whether its handler ends the session or the server.",
                handler.name,
                handler.using,
                row.message_id,
                row.biz_id,
            )


def refund_later(alias: str, refund: Callable[..., None], *given: object) -> None:
    """Call `refund(alias, *given)` when the database is available again."""
    _refunds[alias].append((refund, *given))


def make_refunds(alias: str) -> None:
    """Make the pending refunds of this database.

    Raises:
        DatabaseUnavailable: it is still unavailable, and the refunds stay pending.
    """
    pending = _refunds[alias]
    while pending:
        with suppress(IndexError):  # another thread makes the last one
            _make(alias, pending, pending.popleft())


def _make(alias: str, pending: deque[tuple[Any, ...]], refund: tuple[Any, ...]) -> None:
    try:
        committed(alias, *refund)
    except DatabaseUnavailable as outage:
        pending.appendleft(refund)
        outage.refused = False  # the next message is not the cause
        raise
    except Exception:
        logger.exception(
            "inbox: an attempt on %r could not be refunded; its message is due again after REDELIVERY_AFTER.", alias
        )

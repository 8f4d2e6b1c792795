"""Statements of the inbox's own: retried at once after a collision, once more on a new session, or the database is unavailable.

What executed a statement decides what its error means. When a statement of the inbox fails, other than by a collision or by the
values of its row, the database is the cause: it cannot store, and nothing is decided. When a statement of the handler fails,
that is the handler's failed attempt.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from django.db import DatabaseError, InterfaceError, connections

from inbox.store import dialect
from inbox.transactions.sessions import end_session
from outbox.database.connections import drop_unusable_connections
from outbox.database.faults import UNDEFINED_TABLE, is_about_values, is_collision, is_lost, remedy, sqlstate_of
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

TRIES_AT_ONCE = 5


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
def statements_of_ours() -> Iterator[None]:
    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        if is_collision(error) or is_about_values(error):
            raise
        raise _Unstored from error


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
            if self._replaced or not dialect.is_reachable(self._alias):
                refused = self._replaced and not is_lost(cause)
                raise DatabaseAway(reason, remedy(cause, self._alias), refused=refused) from cause
            self._unfit = "" if is_lost(cause) else reason
        elif is_lost(error):
            if not dialect.is_reachable(self._alias):
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
        with statements_of_ours():
            return write()

    try:
        return persistently(alias, attempt)
    except (DatabaseError, InterfaceError) as error:
        if is_collision(error):
            raise DatabaseAway(describe(error)) from error
        raise

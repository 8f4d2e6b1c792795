"""Running transactions: rerun after a collision, and once on a new session; then the database counts as unavailable.

The meaning of an error depends on whose statement failed. If it is a statement of the handler, the attempt fails. If it is a
statement of the inbox, and neither a collision nor the values of its row are the cause, then the database cannot store, and
nothing is decided.
"""

import logging
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Concatenate, ParamSpec, TypeVar

from django.db import DatabaseError, InterfaceError, connections

from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.sql.faults import UNDEFINED_TABLE, is_about_values, is_collision, is_lost, remedy, sqlstate_of
from exactly_once.wire.text import describe
from inbox.store import dialect
from inbox.transactions.sessions import end_session

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

TRIES_AT_ONCE = 5


class DatabaseUnavailable(Exception):
    """The handler's database does not answer, or cannot store. Nothing was decided: do not acknowledge, wait, receive again.

    Attributes:
        remedy: the operator's remedy, or "".
        refused: it answers, but has refused to store this on two sessions; it may store other messages.
    """

    def __init__(self, reason: str, remedy: str = "", *, refused: bool = False) -> None:
        super().__init__(reason)
        self.remedy = remedy
        self.refused = refused


class _Unstored(Exception):
    """A statement of the inbox failed for a reason other than its row. `__cause__` is the database's error."""


class _StatementsOfOurs(AbstractContextManager[object]):
    """A context of statements of the inbox, not of a handler."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, DatabaseError | InterfaceError) and not (is_collision(error) or is_about_values(error)):
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
    drop_unusable_connections()
    unfit: str | None = None
    collisions = 0
    while True:
        try:
            done = attempt()
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
    if is_lost(error):
        if not dialect.is_reachable(alias):
            raise DatabaseUnavailable(describe(error)) from error
        return None if is_new or not reruns else ""
    if _may_be_of_its_session(error):
        end_session(alias)
    return None


def _may_be_of_its_session(error: BaseException) -> bool:
    """Did a statement fail for a reason other than its values? The reason may be a setting of an earlier handler."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, DatabaseError | InterfaceError):
            return not is_about_values(link)
        link = link.__cause__ or link.__context__
    return False


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

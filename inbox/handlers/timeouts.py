"""The timeout of a handler.

Python cannot stop a thread. `PyThreadState_SetAsyncExc` raises an exception at the thread's next bytecode, and PostgreSQL can
cancel a statement; neither interrupts a call into a C library. A coroutine runs on a separate thread, where its event loop
cancels it. A handler that still runs at twice its timeout ends the process: its open transactions are rolled back and its
unanswered deliveries are redelivered to another process, which counts the attempt.
"""

import ctypes
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from operator import attrgetter

from django.db import DatabaseError

from exactly_once.process.clock import monotonic
from exactly_once.process.deadlines import Deadlines
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import EXIT_SILENT
from inbox.errors import HandlerTimeout

logger = escaping_logger(__name__)

_SHORTEST_GRACE_SECONDS = 5.0
_CANCEL_GRACE_SECONDS = 1.0


@dataclass(eq=False)
class _Run:
    """One run of a handler on one thread."""

    what: str
    thread: int
    seconds: float
    ends_at: float
    claimed: threading.Lock = field(default_factory=threading.Lock)
    """Taken once and never released: by the run's thread if it ends in time, or by the monitor, which then interrupts it."""
    interrupted: bool = False


def _end(runs: list[_Run]) -> None:
    for run in runs:
        if run.interrupted:
            logger.critical(
                "handler %s: its timeout of %.1f s has passed and it cannot be interrupted. The process ends; its messages are "
                "redelivered. The stack of every thread follows.",
                run.what,
                run.seconds,
            )
            faulthandler.dump_traceback(file=sys.__stderr__ or 2)
            os._exit(EXIT_SILENT)
        run.ends_at = monotonic() + _grace(run.seconds)
        if run.claimed.acquire(blocking=False):
            _raise_in(run.thread, HandlerTimeout)
            run.interrupted = True


def _unwatch(run: _Run) -> None:
    """After this, the monitor raises nothing in the run's thread.

    This does not wait for a lock: the exception may be raised at any instruction, also right after a lock was acquired.
    """
    if not run.claimed.acquire(blocking=False):
        while not run.interrupted:
            time.sleep(0)
        _raise_in(run.thread, None)
    _monitor.remove(run)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise it at the thread's next bytecode; None cancels a pending one."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error))


def _grace(seconds: float) -> float:
    """How long after its timeout a run that cannot be interrupted ends its process."""
    return max(seconds, _SHORTEST_GRACE_SECONDS)


def limits_of(limit: timedelta, runs: int) -> tuple[bytes, bytes]:
    """The statements that bound, in PostgreSQL, a transaction with as many runs of this timeout.

    The second one belongs into a transaction of their own: its locks are released even if its host has vanished, because the
    server ends the session when the process would have ended itself.
    """
    idle = (limit * runs).total_seconds()
    statement = f"SET LOCAL statement_timeout = {int(limit.total_seconds() * 1000)}"
    return statement.encode(), f"SET LOCAL idle_in_transaction_session_timeout = {int((idle + _grace(idle)) * 1000)}".encode()


_monitor: Deadlines[_Run] = Deadlines("handler-timeouts", attrgetter("ends_at"), _end)


@contextmanager
def bounded(what: str, limit: timedelta, *, cancels_itself: bool = False) -> Iterator[None]:
    """Raise HandlerTimeout in this thread if the block takes longer than `limit`.

    Args:
        cancels_itself: the block raises TimeoutError at its limit. It is interrupted only if it has not ended a second later.

    Raises:
        HandlerTimeout: the block took longer than `limit`.
    """
    began_at, seconds = monotonic(), limit.total_seconds()
    interrupts_at = began_at + seconds + (_CANCEL_GRACE_SECONDS if cancels_itself else 0)
    run = _Run(what=what, thread=threading.get_ident(), seconds=seconds, ends_at=interrupts_at)
    try:
        _monitor.add(run)
        yield
    except HandlerTimeout as error:
        raise HandlerTimeout(what, limit) from error
    except (DatabaseError, TimeoutError) as error:
        # The database has cancelled a statement after the timeout, or the block has ended itself.
        if monotonic() - began_at >= seconds:
            raise HandlerTimeout(what, limit) from error
        raise
    else:
        if not cancels_itself and monotonic() - began_at >= seconds:
            # It has suppressed the error of a statement that the database has cancelled, before the alarm has come.
            raise HandlerTimeout(what, limit)
    finally:
        try:
            _unwatch(run)
        except HandlerTimeout:
            # The exception is raised once; it was raised between the end of the handler and here.
            _unwatch(run)

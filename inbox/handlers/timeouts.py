"""A handler that may take only so long.

Python cannot stop a thread. An exception can be raised in it at its next bytecode (`PyThreadState_SetAsyncExc`, the C API's
own remedy for this), and PostgreSQL can be told to cancel a statement; what sits in a call of some C library hears neither.
A coroutine runs on a thread of its own and is cancelled there, by its event loop. A handler that is still there at twice its
time ends the process: everything in hand is an open transaction or an unanswered delivery and goes to the next one, where the
attempt is counted.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf

from django.db import DatabaseError

from inbox.errors import HandlerTimeout
from outbox.kernel.clock import monotonic
from outbox.kernel.loop import EXIT_SILENT

logger = logging.getLogger(__name__)

_LEAST_GRACE_SECONDS = 5.0
_A_MOMENT_SECONDS = 1.0


@dataclass(eq=False)
class _Run:
    """One run of a handler on one thread."""

    what: str
    thread: int
    seconds: float
    ends_at: float
    decided: threading.Lock = field(default_factory=threading.Lock)
    """Taken once and never let go: by its thread, which has ended in time then, or by the alarm, which strikes then."""
    struck: bool = False


class _Alarm:
    """The thread that watches all bounded runs of this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs: set[_Run] = set()
        self._thread: threading.Thread | None = None
        self._looks_at = inf

    def watch(self, run: _Run) -> None:
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="handler-timeouts", daemon=True)
                self._thread.start()
            if run.ends_at < self._looks_at:
                self._changed.notify()
            # Nothing may strike while this thread holds a lock: last, and without one it is seen by nobody yet.
            self._runs.add(run)

    def forget(self, run: _Run) -> None:
        """After this, nothing is raised in the run's thread any more.

        No lock of ours is waited for here: the exception may strike at any instruction, also between getting one and knowing.
        """
        if not run.decided.acquire(blocking=False):
            while not run.struck:
                time.sleep(0)
            _raise_in(run.thread, None)
        self._runs.discard(run)

    def _work(self) -> None:
        with self._changed:
            while True:
                now = monotonic()
                runs = list(self._runs)
                for run in runs:
                    if now >= run.ends_at:
                        self._end(run, now)
                self._looks_at = min((run.ends_at for run in runs), default=inf)
                self._changed.wait(None if self._looks_at == inf else self._looks_at - now)

    @staticmethod
    def _end(run: _Run, now: float) -> None:
        if run.struck:
            logger.critical(
                "Ending this process: %s may take %.1f s and cannot be stopped. What is in hand goes to the next one.",
                run.what,
                run.seconds,
            )
            faulthandler.dump_traceback(file=sys.__stderr__ or 2)
            os._exit(EXIT_SILENT)
        run.ends_at = now + max(run.seconds, _LEAST_GRACE_SECONDS)
        if run.decided.acquire(blocking=False):
            _raise_in(run.thread, HandlerTimeout)
            run.struck = True


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Have it raised at the thread's next bytecode; None takes back what was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error))


_alarm = _Alarm()


@contextmanager
def bounded(what: str, limit: timedelta | None, *, by_itself: bool = False) -> Iterator[None]:
    """Raise HandlerTimeout in this thread when the block takes longer than `limit`; None does not bound it.

    Args:
        by_itself: the block ends at its limit with a TimeoutError. Only when it has not a moment later is it struck.

    Raises:
        HandlerTimeout: it took longer.
    """
    if limit is None:
        yield
        return
    began_at, seconds = monotonic(), limit.total_seconds()
    strikes_at = began_at + seconds + (_A_MOMENT_SECONDS if by_itself else 0)
    run = _Run(what=what, thread=threading.get_ident(), seconds=seconds, ends_at=strikes_at)
    try:
        _alarm.watch(run)
        yield
    except HandlerTimeout as error:
        raise HandlerTimeout(what, limit) from error
    except (DatabaseError, TimeoutError) as error:
        # The statement that the database cancelled because our time was up, or what ended by itself.
        if monotonic() - began_at >= seconds:
            raise HandlerTimeout(what, limit) from error
        raise
    finally:
        try:
            _alarm.forget(run)
        except HandlerTimeout:
            # It strikes once, and did so between the handler's end and here.
            _alarm.forget(run)

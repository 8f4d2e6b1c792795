"""A handler that may take only so long.

Python cannot stop a thread. An exception can be raised in it at its next bytecode (`PyThreadState_SetAsyncExc`, the C API's
own remedy for this), and PostgreSQL can be told to cancel a statement; what sits in a call of some C library hears neither.
A handler that is still there at twice its time ends the process: everything in hand is an open transaction or an unanswered
delivery and goes to the next one, where the attempt is counted.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from django.db import DatabaseError

from inbox.errors import HandlerTimeout
from outbox.kernel.clock import monotonic
from outbox.kernel.loop import EXIT_SILENT

logger = logging.getLogger(__name__)

_LEAST_GRACE_SECONDS = 5.0


@dataclass(eq=False)
class _Run:
    """One run of a handler on one thread."""

    what: str
    thread: int
    seconds: float
    ends_at: float
    told: bool = False


class _Alarm:
    """The thread that watches all bounded runs of this process. It is there while there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs: set[_Run] = set()
        self._thread: threading.Thread | None = None

    def watch(self, run: _Run) -> None:
        with self._changed:
            self._runs.add(run)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="handler-timeouts", daemon=True)
                self._thread.start()
            self._changed.notify()

    def forget(self, run: _Run) -> None:
        """After this, nothing is raised in the run's thread any more."""
        with self._changed:
            self._runs.discard(run)
            if run.told:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(run.thread), None)

    def _work(self) -> None:
        with self._changed:
            while True:
                now = monotonic()
                for run in self._runs:
                    if now >= run.ends_at:
                        self._end(run, now)
                self._changed.wait(min((run.ends_at - now for run in self._runs), default=None))

    @staticmethod
    def _end(run: _Run, now: float) -> None:
        if run.told:
            logger.critical(
                "Ending this process: %s may take %.1f s and cannot be stopped. What is in hand goes to the next one.",
                run.what,
                run.seconds,
            )
            faulthandler.dump_traceback(file=sys.__stderr__ or 2)
            os._exit(EXIT_SILENT)
        run.told = True
        run.ends_at = now + max(run.seconds, _LEAST_GRACE_SECONDS)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(run.thread), ctypes.py_object(HandlerTimeout))


_alarm = _Alarm()


@contextmanager
def bounded(what: str, limit: timedelta | None) -> Iterator[None]:
    """Raise HandlerTimeout in this thread when the block takes longer than `limit`; None does not bound it.

    Raises:
        HandlerTimeout: it took longer.
    """
    if limit is None:
        yield
        return
    began_at, seconds = monotonic(), limit.total_seconds()
    run = _Run(what=what, thread=threading.get_ident(), seconds=seconds, ends_at=began_at + seconds)
    try:
        _alarm.watch(run)
        yield
    except HandlerTimeout as error:
        raise HandlerTimeout(what, limit) from error
    except DatabaseError as error:
        # The statement that the database cancelled because our time was up.
        if monotonic() - began_at >= seconds:
            raise HandlerTimeout(what, limit) from error
        raise
    finally:
        _forget(run)


def _forget(run: _Run) -> None:
    while True:
        try:
            _alarm.forget(run)
        except HandlerTimeout:
            # It struck between the handler's end and here, and the handler has ended.
            continue
        return

"""Stoppable loops: a stop request lets a loop finish its current work; a watchdog ends the process of a loop that hangs.

Every loop waits on a `StopRequest` instead of sleeping; a `Bell` also wakes it when there is work. `running_until_signalled`
connects a stop request to SIGTERM and SIGINT while a command runs; `process.main_thread` limits how long a stop may take. A
`Watchdog` protects against a socket or a lock that never answers: the process looks alive and does nothing, and only its end
gives its work to another process.

What an operator may ask of a running process (`Request`) is in the row of the process's heartbeat. The process reads it with
its next heartbeat, carries it out and acknowledges it in the row, so an operator needs access to the database only, not to the
host. The row is read and written anyway, so a request costs no further query. A signal would need access to the host, and the
process id inside a container. A NOTIFY is lost if the process does not listen at that moment, and SQLite has none. A message
through the broker would not arrive while the broker is unavailable.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from enum import StrEnum
from types import FrameType
from typing import NoReturn, Protocol

from exactly_once.process.clock import awake
from exactly_once.process.life_sign import LifeSignWriter, giving_life_signs
from exactly_once.process.logs import escaping_logger

logger = escaping_logger(__name__)

_PIPE_BYTES = 65_536

EXIT_SILENT = 70
"""Exit status of a process that could not end in an orderly way (EX_SOFTWARE of sysexits.h)."""


class Request(StrEnum):
    """A request to one process."""

    PAUSE = "pause"
    """Begin no work; finish what is in hand."""
    RESUME = "resume"
    """Work again."""
    DRAIN = "drain"
    """Finish what is due, then end."""
    STOP = "stop"
    """End as after SIGTERM: finish what is in hand only."""


class Mode(StrEnum):
    """What a process does."""

    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPING = "stopping"


ALLOWED_IN = {
    Request.PAUSE: (Mode.RUNNING,),
    Request.RESUME: (Mode.PAUSED,),
    Request.DRAIN: (Mode.RUNNING, Mode.PAUSED),
    Request.STOP: (Mode.RUNNING, Mode.PAUSED, Mode.DRAINING),
}
"""By request: the modes of a process in which it has an effect. A process that drains or stops does not work again."""


class HasFileno(Protocol):
    """A socket or another object that `poll` can wait on."""

    def fileno(self) -> int: ...


class Bell:
    """Wakes one loop when there may be work. Any thread or signal handler may ring it.

    A ring before the wait is not lost: its byte stays in a pipe until the next wait, which reads all bytes as one ring.

    Attributes:
        is_connected: other processes' work rings it, too, so its loop need not poll often.
    """

    def __init__(self) -> None:
        self.is_connected = False
        self._wake, self._ring = os.pipe()
        for end in (self._wake, self._ring):
            os.set_blocking(end, False)

    def __del__(self) -> None:
        os.close(self._wake)
        os.close(self._ring)

    def ring(self) -> None:
        # A full pipe already holds a ring.
        with suppress(BlockingIOError):
            os.write(self._ring, b"!")

    def fileno(self) -> int:
        """Readable after a ring, until the next wait."""
        return self._wake

    def wait(self, seconds: float, stop: StopRequest | None, *, also: HasFileno | None = None) -> bool:
        """Sleep up to `seconds`, or until a stop is requested, `also` is readable or the bell rings; True if the bell rang."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for other in (stop, also):
            if other is not None:
                poll.register(other, select.POLLIN)
        poll.poll(seconds * 1000)
        try:
            return bool(os.read(self._wake, _PIPE_BYTES))
        except BlockingIOError:
            return False


class StopRequest:
    """A request to end this process. Loops wait on it instead of sleeping.

    A signal handler sets it, and interrupts the main thread anywhere, also in a wait. There a `threading.Event` could need a
    lock that the same thread holds. A flag and a pipe need no lock (Bernstein's self-pipe).

    An operator's requests (`process.loop`) reach the loops the same way. They apply to the whole process, so a follower
    passes them to its leader.

    Attributes:
        is_set: True once the process is to end; also the value as a condition.
    """

    def __init__(self, leader: StopRequest | None = None) -> None:
        self._leader = leader
        self._followers: tuple[StopRequest, ...] = ()
        self.is_set = self._paused = self._draining = False
        self._bell = Bell()

    def __bool__(self) -> bool:
        return self.is_set

    def set(self) -> None:
        self.is_set = True
        self._bell.ring()
        for follower in self._followers:
            follower.set()

    def follower(self) -> StopRequest:
        """A request that ends one phase of the process: it is set with this one, and when the process is to drain."""
        follower = StopRequest(self)
        self._followers += (follower,)
        if self.is_set or self._draining:
            follower.set()
        return follower

    def obey(self, request: Request) -> None:
        """Carry out an operator's request."""
        if self._leader is not None:
            self._leader.obey(request)
            return
        if request is not Request.STOP:
            self._paused = request is Request.PAUSE
        if request is Request.STOP:
            self.set()
        elif request is Request.DRAIN:
            self._draining = True
            for follower in self._followers:
                follower.set()

    @property
    def is_paused(self) -> bool:
        """Begin no work until it is resumed."""
        return self._paused if self._leader is None else self._leader.is_paused

    @property
    def is_draining(self) -> bool:
        """Finish what is due, then end."""
        return self._draining if self._leader is None else self._leader.is_draining

    @property
    def mode(self) -> Mode:
        """What the process does now."""
        if self._leader is not None:
            return self._leader.mode
        if self.is_set:
            return Mode.STOPPING
        if self._draining:
            return Mode.DRAINING
        return Mode.PAUSED if self._paused else Mode.RUNNING

    def wait(self, seconds: float) -> bool:
        """Sleep up to `seconds`; return True as soon as a stop is requested."""
        if not self.is_set:
            # The ring is never read, so it wakes every waiting thread.
            poll = select.poll()
            poll.register(self, select.POLLIN)
            poll.poll(seconds * 1000)
        return self.is_set

    def fileno(self) -> int:
        """Readable as soon as a stop is requested, for a loop that also waits on something else."""
        return self._bell.fileno()


class Watchdog:
    """Ends the process when a loop has not called `beat` for `limit`.

    Time in which the machine was suspended does not count, because no loop could call it then.

    No message is lost: work in progress is an open transaction or an unacknowledged delivery.

    Args:
        kind: of the life signs of this process, "relay" or "consumer"; "" for none.
    """

    def __init__(self, *, limit: timedelta, kind: str = "") -> None:
        self._limit = limit.total_seconds()
        self._kind = kind
        self._beaten_at: dict[threading.Thread, float] = {}
        self._done = threading.Event()

    def beat(self) -> None:
        """Report that the loop of this thread is alive. The first call starts watching it, until its thread ends."""
        self._beaten_at[threading.current_thread()] = awake()

    def leave(self) -> None:
        """Report that the loop of this thread has ended."""
        self._beaten_at.pop(threading.current_thread(), None)

    @contextmanager
    def watching(self) -> Iterator[Watchdog]:
        self.beat()
        with giving_life_signs(self._kind, self._limit) if self._kind else nullcontext() as life_sign:
            thread = threading.Thread(target=self._watch, args=[life_sign], name="watchdog", daemon=True)
            thread.start()
            try:
                yield self
            finally:
                self._done.set()
                thread.join()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the limit for work that may take long. The time for a stop is still limited (`process.main_thread`)."""
        limit, self._limit = self._limit, float("inf")
        try:
            yield
        finally:
            self.beat()
            self._limit = limit

    def _watch(self, life_sign: LifeSignWriter | None) -> None:
        while not self._done.wait(min(1.0, self._limit / 4)):
            now = awake()
            watched = [(thread, beaten_at) for thread, beaten_at in list(self._beaten_at.items()) if thread.is_alive()]
            for thread, beaten_at in watched:
                if now - beaten_at > self._limit:
                    end_process(f"the loop of {thread.name} has been silent for more than {self._limit:.0f} s")
            if life_sign is not None:
                is_limited = self._limit != float("inf")
                oldest = min((beaten_at for _, beaten_at in watched), default=now) if is_limited else now
                life_sign.moved(now - oldest)


def end_process(reason: str) -> NoReturn:
    """Log the reason and the stacks of all threads, and end this process without waiting for any of them."""
    logger.critical("Ending this process: %s. Another process takes over its work.", reason)
    faulthandler.dump_traceback(file=sys.__stderr__ or 2)
    os._exit(EXIT_SILENT)


@contextmanager
def running_until_signalled(stop: StopRequest) -> Iterator[StopRequest]:
    """Turn the first SIGTERM or SIGINT into a stop request; a second one ends the process at once.

    Outside the main thread, where Python delivers no signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(signum: int, frame: FrameType | None) -> None:
        if stop:
            os._exit(128 + signum)
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Worker threads: each has its own database connection and runs the next load, from the broker or from the store.

The thread that owns the broker connection puts deliveries in and gets answers out. Deliveries and stored messages take turns,
so that neither starves the other. No more handlers run at a time than there are threads.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import connections

from exactly_once.process import work
from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.process.main_thread import stack_of
from exactly_once.process.work import Work
from inbox.consumer.answers import Delivery, Unanswered
from inbox.consumer.lanes import Lane
from inbox.consumer.reception import Reception
from inbox.consumer.runner import Runner
from inbox.handlers.handler import Handler
from inbox.limits import slots

logger = escaping_logger(__name__)

_LONGEST_WAIT_SECONDS = 0.5
_CHAIN_SECONDS = 0.01
"""How long a thread goes on with one lane, before others and stored messages have their turn."""


class Pool:
    """`size` threads that run the due messages of `runner`, and in turn with them loads of `lanes` by `reception`.

    While a lane's handler sheds load, its loads are checked before they are received. `Unanswered` deliveries go back to the
    front of their lane. While a database cannot store, all lanes of its handlers pause, and the runner tries it.

    Args:
        on_idle: called whenever a thread finds no work; must be quick.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        size: int,
        lanes: Sequence[Lane] = (),
        reception: Reception | None = None,
        on_idle: Callable[[], object] = dict,
    ) -> None:
        self._lanes = list(lanes)
        self._runner = runner
        runner.receives_on = {lane.handler.using for lane in lanes}
        runner.on_ring = self._wake
        runner.keeps_others_waiting = self._keeps_others_waiting
        self._reception: Any = reception  # without one there are no lanes
        self._on_idle = on_idle
        self._changed = threading.Condition()
        self._closing = False
        self._stored_next = False
        self._next_lane = 0
        self._occupied: set[str] = set()
        self._overdue: set[Work] = set()
        self._running: dict[int, Handler] = {}
        self._threads = [threading.Thread(target=self._work, name=f"worker-{n}", daemon=True) for n in range(1, size + 1)]
        self._storing = threading.Thread()  # not started

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> int:
        return sum(thread.is_alive() for thread in (*self._threads, self._storing))

    def refuse_if_ended(self) -> None:
        """Raises RuntimeError if a thread has ended before `close`."""
        if not all(thread.is_alive() for thread in self._threads):
            raise RuntimeError("consumer: a worker thread has ended unexpectedly; the process ends. Restart it.")

    def report_overdue(self, limit: timedelta) -> None:
        """Log once each message that has been running for longer than `limit`, and each handler that uses all its threads."""
        overdue = work.lasting("inbox", limit.total_seconds())
        for one in overdue.keys() - self._overdue:
            # Its inbox row may not be committed, so no other connection sees it.
            logger.warning(
                "handler %s: message %s has been running for %.0f s and occupies a worker thread. Set timeout= to limit a run. "
                "The stack of the thread:\n%s",
                *(one.what, one.message, monotonic() - one.began_at, stack_of(overdue[one])),
            )
        self._overdue = {*overdue}
        occupied = slots.occupied(limit)
        for name in occupied.keys() - self._occupied:
            count, seconds, thread = occupied[name]
            logger.error(
                "handler %s: each of the %d threads that may run it has been running it for more than %.0f s, so its other "
                "messages wait. %s. Set timeout= to limit a run. The stack of one of the threads:\n%s",
                *(name, count, seconds),
                "Other handlers continue" if count < len(self._threads) else "They are all threads, so other handlers wait too",
                stack_of(thread),
            )
        self._occupied = {*occupied}

    def put(self, lane: Lane, delivery: Delivery) -> None:
        with self._changed:
            lane.put(delivery)
            if not lane.is_filling:
                self._changed.notify()

    def hurry(self) -> None:
        """Do not wait for batches to fill."""
        with self._changed:
            for lane in self._lanes:
                lane.wait = 0.0
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more loads. The threads finish the current ones and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def drop_ended(self) -> int:
        """Drop the waiting deliveries of channels that have ended; returns how many."""
        with self._changed:
            return sum(lane.drop_ended() for lane in self._lanes)

    def unstorable(self, before: float) -> list[Lane]:
        """Lanes with deliveries that arrived before that instant and could not be stored."""
        with self._changed:
            stuck = [lane for lane in self._lanes if lane.is_stuck or not self._runner.can_store(lane.handler.using)]
            return [lane for lane in stuck if lane.oldest < before]

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` for a thread to end."""
        for thread in (*self._threads, self._storing):
            if thread.is_alive():
                thread.join(seconds)
                return

    def store_stale(self, before: float) -> None:
        """Let the deliveries that arrived before `before` be stored, on a separate thread: by then, no worker is idle."""
        if not self._storing.is_alive() and (stale := self.stale(before)):
            self._storing = threading.Thread(target=self._store_all, args=[stale], name="storing", daemon=True)
            self._storing.start()

    def _store_all(self, stale: list[tuple[Lane, list[Delivery]]]) -> None:
        try:
            for lane, load in stale:
                self.run(lane, load, self._reception.receive)
        finally:
            connections.close_all()

    def stale(self, before: float) -> list[tuple[Lane, list[Delivery]]]:
        """Remove and return the deliveries that arrived before `before`, except those whose database cannot store messages."""
        with self._changed:
            now = monotonic()
            return [(lane, stale) for lane in self._answering if (stale := lane.stale(before, now))]

    def run(self, lane: Lane, load: list[Delivery], do: Callable[[list[Delivery]], object]) -> None:
        """Run a load on this thread; `Unanswered` deliveries go back to the front of their lane."""
        left: Unanswered | None = None
        handler, message = lane.handler, load[0].message.properties.get("message_id")
        before = work.begin("inbox", handler.using, handler.name, str(message or ""), len(load))
        try:
            do(load)
        except Unanswered as unanswered:
            left = unanswered
        finally:
            work.end(before)
            with self._changed:
                self._running.pop(threading.get_ident(), None)
                if left is None:
                    lane.done()
                else:
                    lane.put_back(left.load, monotonic(), backoff=left.seconds)
                self._changed.notify()

    @property
    def _answering(self) -> list[Lane]:
        """The lanes of databases that can store."""
        return [lane for lane in self._lanes if self._runner.can_store(lane.handler.using)]

    def is_running(self, handler: Handler) -> bool:
        """May a thread have a load of this handler in hand? Once the handler is paused, no thread takes another one."""
        with self._changed:
            return self._storing.is_alive() or handler in self._running.values()

    def _keeps_others_waiting(self, handler: Handler) -> bool:
        """Are there deliveries that should be received before more stored messages of this handler are run?"""
        # Those of an ordered handler are stored behind the messages that are stored.
        lanes = [lane for lane in self._lanes if lane and not (handler.ordered and lane.handler is handler)]
        return any(not self._runner.is_paused(lane.handler) for lane in lanes)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    @property
    def idle(self) -> bool:
        """Is every delivery finished: none waits, and no worker runs one?"""
        with self._changed:
            return not (any(self._lanes) or self._running)

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
        finally:
            connections.close_all()

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            while not self._closing:
                now = monotonic()
                if job := self._choose(now):
                    self._changed.notify()  # there may be more work for an idle thread
                    return job
                self._on_idle()
                lanes = [lane for lane in self._answering if not self._runner.is_paused(lane.handler)]
                left = [lane.seconds_left(now) for lane in lanes]
                self._changed.wait(min(*left, self._runner.seconds_left(now), _LONGEST_WAIT_SECONDS))
        return None

    def _choose(self, now: float) -> Callable[[], object] | None:
        if self._stored_next and self._runner.seconds_left(now) <= 0:
            self._stored_next = False
            return self._runner.turn
        for turn in range(len(self._lanes)):
            lane = self._lanes[(self._next_lane + turn) % len(self._lanes)]
            if not self._runner.can_store(lane.handler.using) or self._runner.is_paused(lane.handler):
                continue
            if load := lane.take(now):
                return self._job(lane, load, turn, partial(self._receive_for, lane))
            if load := lane.take_to_check(now):
                return self._job(lane, load, turn, partial(self._check_for, lane))
            if lease := lane.token_lease:
                return lease
        return self._runner.turn if self._runner.seconds_left(now) <= 0 else None

    def _job(self, lane: Lane, load: list[Delivery], turn: int, do: Callable[[list[Delivery]], object]) -> Callable[[], object]:
        self._next_lane += turn + 1
        self._stored_next = True
        self._running[threading.get_ident()] = lane.handler
        return partial(self.run, lane, load, do)

    def _receive_for(self, lane: Lane, load: list[Delivery]) -> None:
        more = partial(self._next_delivery, lane, monotonic() + _CHAIN_SECONDS)
        try:
            self._reception.receive(load, more)
        except Unanswered as left:
            lane.give_back_tokens(len(left.load))
            raise
        finally:
            lane.slots.leave()

    def _next_delivery(self, lane: Lane, until: float) -> Delivery | None:
        """The next delivery of a lane for the thread that has just run one of it."""
        with self._changed:
            now = monotonic()
            may_run = self._runner.can_store(lane.handler.using) and not self._runner.is_paused(lane.handler)
            return lane.take_next(now) if may_run and now < until and not self._runner.stop else None

    def _check_for(self, lane: Lane, load: list[Delivery]) -> None:
        to_handle = self._reception.check(load)
        with self._changed:
            lane.put_checked(to_handle)

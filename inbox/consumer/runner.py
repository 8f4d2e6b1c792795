"""The runner: executes stored messages when they are due: retries, handed-over messages, the careful path.

Each message is claimed in its own commit and run in its own transaction, so any number of runners may work concurrently, in
any number of processes.
"""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from math import inf

from django.db import connections

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder, escaping_logger
from exactly_once.process.loop import Bell, StopRequest
from inbox.conf import InboxOptions, has_outbox
from inbox.consumer.names import Unattended
from inbox.handlers.handler import Handler
from inbox.handlers.options import past_in_words
from inbox.handlers.registry import registry
from inbox.limits.limiter import limiter_of
from inbox.limits.slots import slots_of
from inbox.models import InboxMessage
from inbox.receiving.outages import Outages, make_refunds, refund_later
from inbox.receiving.receive import claim_next, run_stored
from inbox.store import claims, due, handler_rows, ordering
from inbox.store.message_rows import OrderedKey, Successor
from inbox.transactions.running import DatabaseUnavailable, committed

logger = escaping_logger(__name__)

_SHORTEST_POLL_SECONDS = 0.01
_LONGEST_WAIT_SECONDS = 0.05
_SWEEP_SECONDS = 10.0
_AFTER_AN_ERROR_SECONDS = 1.0
_SUCCESSORS_SECONDS = 0.05
"""Due messages of other handlers wait as long for this worker."""
_PAUSED_SECONDS = 1.0
"""How often the paused handlers are read. The claim of a stored message reads them itself."""


def _do_nothing() -> None:
    pass


def _wait_for_token(handler: Handler) -> float:
    """Seconds until the rate limit of this handler may allow a run; 0 if it can be asked now."""
    limiter = limiter_of(handler)
    wait = limiter.wait_seconds() if limiter else 0.0
    return wait if wait > _SHORTEST_POLL_SECONDS else 0.0


def _due_among(handlers: Iterable[Handler]) -> list[Handler]:
    """The handlers with a stored message due now, in their order; one query for each database."""
    by_alias: defaultdict[str, dict[str, Handler]] = defaultdict(dict)
    for handler in handlers:
        by_alias[handler.using][handler.name] = handler
    return [named[name] for alias, named in by_alias.items() for name in committed(alias, due.due_handlers, [*named])]


def _after(served: str, handlers: Sequence[Handler]) -> list[Handler]:
    """All of them, by name, starting after the one named `served`."""
    return sorted(handlers, key=lambda handler: (handler.name <= served, handler.name))


class Runner:
    """Runs the due messages of this process's handlers. A message of an unknown handler stays for a worker that knows it.

    Any number of threads may take turns. While nothing is due, one of them polls at growing intervals; a thread that finds
    a message wakes the next one.

    Args:
        handlers: returns the handlers of this process; called repeatedly.
        reports_unknown: log once that messages of other handlers are stored.

    Attributes:
        stop: no run is begun once this is set.
        unattended: the handlers without code here, if they are reported.
        is_reproducible: it does nothing by the clock, so that two runs over equal data make the same commits: it takes no
            successors and repairs no orders. An unavailable database ends `drain`.
        receives_on: the databases of deliveries. They are not received before a trial has stored a row there.
    """

    def __init__(
        self,
        options: InboxOptions,
        stop: StopRequest | None = None,
        *,
        handlers: Callable[[], Sequence[Handler]] = registry.all,
        reports_unknown: bool = True,
    ) -> None:
        self._options = options
        self.unattended = Unattended() if reports_unknown else None
        self._handlers = handlers
        self.stop = StopRequest() if stop is None else stop
        self.outages = Outages()
        self._try_at: dict[str, float] = {}
        self._lock = threading.Lock()
        self._poll_at = 0.0
        self._poll_interval = _SHORTEST_POLL_SECONDS
        self._swept_at: dict[str, float] = {}
        self._swept_up_to: dict[str, OrderedKey | None] = {}
        self._free_first: set[str] = set()
        self._served: dict[str, str] = {}
        self._paused: dict[str, frozenset[str]] = {}
        self._paused_read_at: dict[str, float] = {}
        self._declared: frozenset[str] = frozenset()
        self._started: set[str] = set()
        self._starting: defaultdict[str, Reminder] = defaultdict(Reminder)
        self.is_reproducible = False
        self.receives_on: Collection[str] = ()
        self.on_ring: Callable[[], object] = _do_nothing
        self.keeps_others_waiting: Callable[[Handler], bool] = lambda handler: False
        self.ran = 0

    def run(self, stop: StopRequest) -> None:
        """Work on this thread until asked to stop."""
        self.stop, bell = stop, Bell()
        self.on_ring = bell.ring
        while not stop:
            if left := self.seconds_left(monotonic()):
                bell.wait(left, stop)
            else:
                self.turn()
        connections.close_all()
        logger.info("runner: stopped. Stored messages run: %d.", self.ran)

    def is_paused(self, handler: Handler) -> bool:
        """Has an operator paused this handler or this process, as this process has last read it?"""
        return self.stop.is_paused or handler.name in self._paused.get(handler.using, ())

    def can_store(self, alias: str) -> bool:
        """Could the database store messages when a thread last tried?"""
        return alias in self._paused and not self.outages.is_ongoing(alias)

    def is_starting(self, handler: Handler) -> bool:
        """Does this handler wait for its past, so that nothing may be received from its queue?"""
        return handler.wants_past and handler.name not in self._started and has_outbox(handler.using)

    def declared(self, handlers: Iterable[Handler]) -> None:
        """The queues of these handlers exist, so that new messages wait in them while the past is read."""
        self._declared = frozenset(handler.name for handler in handlers)

    def _read_starting(self, alias: str) -> None:
        asked = [
            handler
            for handler in self._handlers()
            if handler.using == alias and handler.name in self._declared and self.is_starting(handler)
        ]
        if not asked:
            return
        wanted = {handler.name: handler.starts_at for handler in asked}
        waiting = committed(alias, handler_rows.waiting_among, wanted)
        self._started.update(handler.name for handler in asked if handler.name not in waiting)
        if waiting and self._starting[alias].is_due():
            logger.info(
                "consumer: new handlers wait until a relay has handed over their past (start_from): %s. New messages wait in "
                "their queues.",
                ", ".join(f"{one.name} gets {past_in_words(one.starts_at)}" for one in asked if one.name in waiting),
            )
            if unknown := waiting & committed(alias, handler_rows.without_relay):
                logger.warning(
                    "consumer: no relay has begun to hand over the past of %s. If none does, restart outbox_relay with the "
                    "code that has them.",
                    ", ".join(sorted(unknown)),
                )

    def read_paused(self, alias: str) -> None:
        """Read the paused handlers of a database, and those that wait for their past, at most once a second.

        Raises:
            DatabaseUnavailable: they stay as they were read before.
        """
        with self._lock:
            if monotonic() - self._paused_read_at.get(alias, -inf) < _PAUSED_SECONDS:
                return
            self._paused_read_at[alias] = monotonic()
        self._paused[alias] = committed(alias, due.paused_handlers)
        self._read_starting(alias)

    def ring(self) -> None:
        """A message was stored, or more are due: poll at once, and reset the poll interval."""
        self._poll_interval = _SHORTEST_POLL_SECONDS
        self._poll_now()

    def _poll_now(self) -> None:
        """Poll at once, and keep the poll interval."""
        self._poll_at = 0.0
        self.on_ring()

    def seconds_left(self, now: float) -> float:
        """Seconds until the next poll."""
        return max(0.0, self._poll_at - now)

    def turn(self) -> int:
        """Run at most one message and its successors on each database; returns how many were run."""
        with self._lock:
            self._poll_at = monotonic() + self._poll_interval
            self._poll_interval = min(self._poll_interval * 2, self._options.POLL_INTERVAL.total_seconds())
        return self._turn()

    def drain(self, stop: StopRequest) -> int:
        """Run messages until none is due; returns how many were run. An unexpected error ends it."""
        self.stop = stop
        done = 0
        while not stop:
            now = self._turn(raising=True)
            done += now
            if now:
                continue
            is_waiting = self._try_at or any(map(self.outages.is_paused, [*self.outages.beside]))
            if is_waiting and self.is_reproducible:
                raise DatabaseUnavailable("a database did not answer, see the log")
            wait = _LONGEST_WAIT_SECONDS if is_waiting else self._wait_for_tokens()
            if wait is None:
                break
            stop.wait(wait)
        if done:
            logger.info("runner: drained. Stored messages run: %d.", done)
        return done

    def _turn(self, *, raising: bool = False) -> int:
        handlers = self._handlers()
        ran = 0
        for alias in sorted({handler.using for handler in handlers}):
            claimed: tuple[Handler, InboxMessage] | None = None
            work = f"stored messages on {alias!r}"
            # Do not wait for an unavailable database: this thread has other work.
            if not self._may_try(alias):
                continue
            try:
                is_first = self._try_at.get(alias) == inf and (alias in self.receives_on or self.outages.is_ongoing(alias))
                if is_first and (seconds := self.outages.ask(alias)):
                    self._try_at[alias] = monotonic() + seconds
                    continue
                if self.unattended:
                    self.unattended.report_once(alias, handlers)
                self.read_paused(alias)
                if self.stop.is_paused:
                    self._try_at.pop(alias, None)
                    continue
                make_refunds(alias)
                self._sweep(alias, handlers)
                claimed = self._claim(handlers, alias)
                self._try_at.pop(alias, None)
                if claimed:
                    self.ring()
                    ran += self._run(*claimed)
                self.outages.end(work)
            except DatabaseUnavailable as error:
                self._try_at[alias] = monotonic() + self.outages.pause(alias, work, error)[0]
            except BaseException:
                # No error of a handler or of a signal receiver may end this thread.
                self._try_at[alias] = monotonic() + _AFTER_AN_ERROR_SECONDS
                if raising:
                    raise
                logger.exception(
                    "runner: unexpected error on database %r. The message stays stored and is tried again later.", alias
                )
                connections.close_all()
        with self._lock:
            self.ran += ran
        return ran

    def _may_try(self, alias: str) -> bool:
        """May this thread use the database? False while it is paused. Until it can store, only one thread at a time tries."""
        with self._lock:
            if monotonic() < self._try_at.get(alias, 0.0):
                return False
            if not self.can_store(alias):
                self._try_at[alias] = inf
            return True

    def _run(self, handler: Handler, stored: InboxMessage) -> int:
        """Run the message in the slot that was taken for it."""
        slots = slots_of(handler)
        slots.begin_stored()
        try:
            return self._run_with_successors(handler, stored)
        except DatabaseUnavailable as error:
            if not error.beside:
                raise
            self.outages.pause_handler(handler.name, error)
            return 0
        finally:
            slots.leave()

    def _run_with_successors(self, handler: Handler, stored: InboxMessage) -> int:
        """Run the message, then for a short time its successors. Each saves a search and a commit."""
        ran, until = 0, monotonic() + (0 if self.is_reproducible else _SUCCESSORS_SECONDS)

        def in_turn() -> list[str] | None:
            if handler.rate_limit is not None or monotonic() >= until or self.stop or self.is_paused(handler):
                return None
            return [] if self.keeps_others_waiting(handler) else [handler.name]

        successor = Successor(self._options.REDELIVERY_AFTER, in_turn)
        while True:
            run_stored(handler, stored, self._options, successor)
            if self.outages.beside:
                self.outages.end_beside(handler.name)
            ran += 1
            if successor.message is None:
                return ran + successor.handled
            # Behind a single message, an empty transaction would begin with its commit.
            stored, successor.begins = successor.message, True
            if self.stop or self.is_paused(handler):
                # Another runner can claim it at once, and no attempt is counted.
                refund_later(handler.using, claims.give_back, stored)
                make_refunds(handler.using)
                return ran + successor.handled

    def _claim(self, handlers: Sequence[Handler], alias: str) -> tuple[Handler, InboxMessage] | None:
        """Claim for a handler whose `concurrency` is not reached, and take one of its slots."""
        mine = [handler for handler in handlers if handler.using == alias and handler.kind.is_called]
        if self.outages.beside:
            mine = [handler for handler in mine if not self.outages.is_paused(handler.name)]
        here = [handler for handler in mine if slots_of(handler).take_for_stored(self._poll_now)]
        claimed: tuple[Handler, InboxMessage] | None = None
        try:
            claimed = self._claim_in_turn(here, alias)
        finally:
            for handler in here:
                if not (claimed and claimed[0] is handler):
                    slots_of(handler).give_back()
        return claimed

    def _claim_in_turn(self, handlers: Sequence[Handler], alias: str) -> tuple[Handler, InboxMessage] | None:
        """Handlers with a rate limit and those without take turns, so that neither group delays the other."""
        free = [handler for handler in handlers if handler.rate_limit is None]
        searches = [partial(self._claim_free, free, alias), partial(self._claim_limited, handlers, alias)]
        self._free_first ^= {alias}
        first, second = searches if alias in self._free_first else reversed(searches)
        return first() or second()

    def _claim_free(self, free: Sequence[Handler], alias: str) -> tuple[Handler, InboxMessage] | None:
        """These handlers take turns as well, so that the backlog of one does not delay another."""
        claimed = claim_next(_after(self._served.get(alias, ""), free), alias, self._options)
        if claimed:
            self._served[alias] = claimed[0].name
        return claimed

    def _claim_limited(self, handlers: Sequence[Handler], alias: str) -> tuple[Handler, InboxMessage] | None:
        """Take a token before the claim, but only if a message is due, because unused tokens expire."""
        waits = {handler.name: _wait_for_token(handler) for handler in handlers if handler.rate_limit is not None}
        ready = [handler for handler in handlers if waits.get(handler.name) == 0]
        self._poll_at = min([self._poll_at, *(monotonic() + wait for wait in waits.values() if wait)])
        for handler in _due_among(random.sample(ready, len(ready))):
            limiter = limiter_of(handler)
            if limiter and limiter.take_or_lease(1):
                if claimed := claim_next([handler], alias, self._options):
                    return claimed
                limiter.give_back(1)
        return None

    def _wait_for_tokens(self) -> float | None:
        """Seconds until a due message that waits for a rate limit may run; None if there is none."""
        try:
            limited = [handler for handler in self._handlers() if handler.rate_limit is not None]
            waits = [_wait_for_token(handler) for handler in _due_among(limited)]
        except DatabaseUnavailable:
            waits = [0.0]
        return max(_SHORTEST_POLL_SECONDS, min(waits)) if waits else None

    def _sweep(self, alias: str, handlers: Sequence[Handler]) -> None:
        with self._lock:
            if self.is_reproducible or monotonic() - self._swept_at.get(alias, 0.0) < _SWEEP_SECONDS:
                return
            self._swept_at[alias] = monotonic()
        if self.unattended:
            self.unattended.read_running(alias)
        self._sweep_orders(alias, [handler.name for handler in handlers if handler.skips_dead])

    def _sweep_orders(self, alias: str, passing: Sequence[str]) -> None:
        released = committed(alias, ordering.release_stuck, passing, self._swept_up_to.get(alias))
        self._swept_up_to[alias] = released.up_to
        if released.stuck:
            logger.error(
                "runner: the messages of %d ordering keys on database %r were waiting although no earlier message was open. "
                "They were released and are due now. This indicates a bug or a change of rows by hand; please report it.",
                released.stuck,
                alias,
            )
        if released.passed:
            logger.warning(
                "runner: %d dead letters on database %r no longer block their keys, because of Ordered(on_dead='skip').",
                released.passed,
                alias,
            )

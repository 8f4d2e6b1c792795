"""The runner: executes stored messages when they are due — retries, handed-over messages, the careful path.

Each message is claimed in a commit of its own and run in a transaction of its own, so any number of runners may work side by
side, in any number of processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from django.db import connections

from inbox import store
from inbox.conf import InboxOptions
from inbox.handlers import Handler, registry
from inbox.receiving import run_next
from inbox.transactions import DatabaseAway, decided
from outbox.kernel.clock import monotonic
from outbox.kernel.loop import StopRequest
from outbox.kernel.outage import Outage

logger = logging.getLogger(__name__)

_SHORTEST_REST_SECONDS = 0.01
_LONGEST_NAP_SECONDS = 0.05
_SWEEP_SECONDS = 10.0


class Runner:
    """Runs what is due for the handlers of this process. A message of an unknown handler stays for a worker that knows it."""

    def __init__(self, options: InboxOptions) -> None:
        self._options = options
        self._database = Outage("the database")
        self._swept_at: dict[str, float] = {}
        self._owed: list[tuple[str, Callable[[], None]]] = []
        self._told: set[str] = set()
        self._rung = False
        self.ran = 0

    def run(self, stop: StopRequest) -> None:
        """Work until asked to stop."""
        rest = _SHORTEST_REST_SECONDS
        while not stop:
            if self._turn(stop):
                rest = _SHORTEST_REST_SECONDS
            else:
                self._rest(rest, stop)
                rest = min(rest * 2, self._options.POLL_INTERVAL.total_seconds())
        connections.close_all()
        logger.info("The runner has ended; it ran %d stored messages.", self.ran)

    def ring(self) -> None:
        """Something has just been handed over: do not rest."""
        self._rung = True

    def drain(self, stop: StopRequest) -> int:
        """Work until nothing is due; how many messages were run. An error nobody foresaw ends it."""
        done = 0
        while not stop:
            now = self._turn(stop, raising=True)
            if not now and not self._database.ongoing:
                break
            done += now
        if done:
            logger.info("%d stored messages were run.", done)
        return done

    def _rest(self, seconds: float, stop: StopRequest) -> None:
        until = monotonic() + seconds
        while not (stop or self._rung) and monotonic() < until:
            stop.wait(min(_LONGEST_NAP_SECONDS, seconds))
        self._rung = False

    def _tell_orphans(self, alias: str, handlers: Sequence[Handler]) -> None:
        if alias in self._told:
            return
        stored = decided(lambda: store.orphans(alias, [handler.name for handler in handlers]), alias)
        self._told.add(alias)
        for name, count in stored.items():
            logger.warning(
                "%d stored messages wait for a handler called %r, which this process does not know. They stay until one that "
                "does runs them; was it renamed without name=?",
                count,
                name,
            )

    def _turn(self, stop: StopRequest, *, raising: bool = False) -> int:
        """Run at most one message on each database; how many were run."""
        handlers = registry.all()
        ran = 0
        away: DatabaseAway | None = None
        for alias in sorted({handler.using for handler in handlers}):
            try:
                self._tell_orphans(alias, handlers)
                self._settle_debts(alias)
                self._sweep(alias)
                ran += run_next(handlers, alias, self._options) is not None
            except DatabaseAway as error:
                away = error
                if error.owed is not None:
                    self._owed.append((alias, error.owed))
            except BaseException:
                # Nothing that a handler or a receiver of a signal does may end this thread.
                if raising:
                    raise
                logger.exception("The runner met an error nobody foresaw; the message stays stored and is due again later.")
                connections.close_all()
                stop.wait(1.0)
        self.ran += ran
        if away is None:
            self._database.over()
        elif not ran:
            self._database.wait(away, stop)
        return ran

    def _settle_debts(self, alias: str) -> None:
        for debt in [debt for debt in self._owed if debt[0] == alias]:
            decided(debt[1], alias)
            self._owed.remove(debt)

    def _sweep(self, alias: str) -> None:
        if monotonic() - self._swept_at.get(alias, 0.0) < _SWEEP_SECONDS:
            return
        self._swept_at[alias] = monotonic()
        if buried := decided(lambda: store.bury_abandoned(alias), alias):
            logger.error("%d messages on %r are dead letters now: %s", buried, alias, store.ABANDONED)

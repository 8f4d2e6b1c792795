"""Functions of the project that a relay process calls beside its own work: checkers and callbacks.

They may be slow, hang or fail, and none of it may hold up a message. So they have threads of their own, a bounded number, and
no more is claimed than these can begin at once: what is not claimed is free for another process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from django.db import DatabaseError, InterfaceError, connections

from outbox.kernel.databases import drop_unusable_connections
from outbox.kernel.faults import is_collision, is_outage
from outbox.kernel.loop import Bell, StopRequest
from outbox.kernel.outage import Outage
from outbox.kernel.schema import is_missing, report_missing

logger = logging.getLogger(__name__)

_REST_SECONDS = 0.5
_AFTER_A_COLLISION_SECONDS = 0.01

Job = Callable[[], object]
"""A claimed call, and the writing down of what came of it."""


class Attendant:
    """A companion of the relay that calls what is due.

    Args:
        name: of its threads.
        claim: take up to so many jobs that are due, so that no other process takes them meanwhile.
        threads: how many are called at a time.
    """

    def __init__(self, name: str, claim: Callable[[int], Sequence[Job]], *, threads: int) -> None:
        self._name = name
        self._claim = claim
        self._most = threads
        self._busy = 0
        self._counting = threading.Lock()
        self._freed = Bell()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._database = Outage("the database")

    def run(self, stop: StopRequest) -> None:
        threads = [threading.Thread(target=self._work, name=f"{self._name}-{number}") for number in range(self._most)]
        for thread in threads:
            thread.start()
        try:
            while not stop:
                if not self._hand_out(stop):
                    self._freed.wait(_REST_SECONDS, stop)
        finally:
            for _ in threads:
                self._jobs.put(None)
            for thread in threads:
                thread.join()
            connections.close_all()

    def drain(self, stop: StopRequest) -> int:
        """Call everything that is due, one after the other; how much that was. An absent database is waited for."""
        done = 0
        while not stop:
            jobs = self._due(self._most, stop)
            if jobs is None:
                continue
            if not jobs:
                break
            for job in jobs:
                _call(job)
            done += len(jobs)
        return done

    def _hand_out(self, stop: StopRequest) -> int:
        """Give the threads that are free something to do; how much."""
        free = self._most - self._busy
        if not free:
            return 0
        try:
            jobs = self._due(free, stop) or ()
        except Exception:
            logger.exception("What is due could not be claimed, for a reason that nobody foresaw; it stays due.")
            connections.close_all()
            return 0
        with self._counting:
            self._busy += len(jobs)
        for job in jobs:
            self._jobs.put(job)
        return len(jobs)

    def _due(self, most: int, stop: StopRequest) -> Sequence[Job] | None:
        """Claim up to so many; None when the database was away, or somebody in the way."""
        try:
            drop_unusable_connections()
            jobs = self._claim(most)
        except (DatabaseError, InterfaceError) as error:
            if is_outage(error):
                connections.close_all()
                self._database.wait(error, stop)
            elif is_collision(error):
                stop.wait(_AFTER_A_COLLISION_SECONDS)
            elif is_missing(error):
                report_missing(error)
                stop.wait(self._database.enter())
            else:
                raise
            return None
        self._database.over()
        return jobs

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                _call(job)
                with self._counting:
                    self._busy -= 1
                self._freed.ring()
        finally:
            connections.close_all()


def _call(job: Job) -> None:
    try:
        drop_unusable_connections()
        job()
    except BaseException:
        # What came of it could not be written down, or it tried to end the process: it is called again.
        logger.exception("A call beside the relay failed; it is repeated.")

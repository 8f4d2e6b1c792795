"""Kill random processes at random moments, and replace each by another of its kind."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.crash.world import Worker, World
from tests.support.threads import in_threads

SHORTEST_SECONDS, LONGEST_SECONDS = 0.3, 1.0


class Nemesis:
    """Kills until stopped. `kills` counts by command; `own_ends` are the processes that ended without a kill."""

    def __init__(self, world: World, fleet: list[Worker]) -> None:
        self.kills: Counter[str] = Counter()
        self.own_ends: list[str] = []
        self._world = world
        self._fleet = fleet
        self._choice = random.Random(f"{world.seed}-nemesis")
        self._enough = threading.Event()

    @contextmanager
    def at_work(self) -> Iterator[Nemesis]:
        with in_threads(self._run, stop=self._enough):
            yield self

    def last(self, seconds: float) -> None:
        """Let it work that long. The one sleep of these tests: a soak has no condition to wait for."""
        time.sleep(seconds)

    def _run(self) -> None:
        while not self._enough.wait(self._choice.uniform(SHORTEST_SECONDS, LONGEST_SECONDS)):
            place = self._choice.randrange(len(self._fleet))
            victim = self._fleet[place]
            if not victim.is_alive:
                self.own_ends.append(victim.tail())
            elif not victim.is_ready:
                continue  # still importing, so it has claimed nothing
            else:
                victim.kill()
                self.kills[victim.command[0]] += 1
            self._fleet[place] = self._world.again(victim)

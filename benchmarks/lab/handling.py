"""Two consumers on two projects, the inbox and the program written by hand, with equal queues."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.lab.actors import acting
from benchmarks.lab.arrivals import fresh_queue
from benchmarks.lab.deliveries import (
    UNTIMED,
    duplicates,
    duplicates_of,
    effects,
    effects_of,
    enqueue,
    judged,
    rate_of,
    remember,
)
from benchmarks.lab.plan import Plan
from benchmarks.lab.processes import running
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.relays import CONSUMER, consuming
from benchmarks.lab.servers import Lab
from benchmarks.lab.waiting import wait_for, wait_for_end
from benchmarks.lab.workload import Keys, many_customers

HAND_WRITTEN = "hand-written, kombu and psycopg"
LEAN = "hand-written, row inserted as settled"
PUBLISHING = "hand-written, publishes one message"
BULK = "hand-written, 100 in one transaction"
PREFETCH = 50
"""As the inbox's default."""
_MODES = {LEAN: ["lean"], PUBLISHING: ["publish"], BULK: ["bulk"]}
BLOCKS = 3
"""In every run: many short blocks see the same machine more than a few long ones do."""


class Bench:
    """Empties queues of `count` messages, and records rates and verdicts."""

    def __init__(self, lab: Lab, record: Record, *, count: int, keys: Keys = many_customers) -> None:
        self.count = count
        self.project = lab.new_project()
        self._by_hand = lab.new_project()
        self._record = record
        self._keys = keys
        record.note(f"{count:,} messages in the queue; the clock runs from the {UNTIMED}th effect's commit to the last one's.")

    def alternate(self, plan: Plan, sides: Mapping[str, Callable[[], object]]) -> None:
        """Every side in turn, this number of times in each run, every second time in the opposite order."""
        for run in plan.each_run(self._record.name):
            for block in range(plan.choose(full=BLOCKS, quick=1)):
                for side in list(sides) if (run + block) % 2 else list(reversed(sides)):
                    sides[side]()

    def consume(self, project: Project, side: str, *, ordered: bool = False, concurrency: int = 1, again: bool = False) -> None:
        """One `inbox_consume` empties the queue of the project's handler; then again, with duplicates, if they are timed."""
        declare(project)
        remember(project)
        for progress in (effects_of, duplicates_of) if again else (effects_of,):
            enqueue(project, self.count, self._keys)
            with consuming(project, concurrency=concurrency) as consumers:
                wait_for(progress(project, self.count), *consumers)
        self._settle(project, side, ordered=ordered, again=again)

    def hand_written(self, side: str = HAND_WRITTEN, *, again: bool = False) -> None:
        """The program written by hand empties its queue; then again, as `consume`."""
        project = self._by_hand
        project.empty()
        remember(project)
        fresh_queue(project)
        prefetch = 3 * PREFETCH if side == BULK else PREFETCH
        for _ in range(1 + again):
            enqueue(project, self.count, self._keys)
            with acting(project, "hand_written", self.count, prefetch, *_MODES.get(side, [])) as consumer:
                wait_for_end(consumer, project)
        self._settle(project, side, again=again)

    def _settle(self, project: Project, side: str, *, ordered: bool = False, again: bool = False) -> None:
        found = effects(project)
        self._record.judge(judged(project, side, self.count, found, ordered=ordered))
        self._record.add(side, rate_of(duplicates(project) if again else found), "msg/s")


def declare(project: Project) -> None:
    """An empty project with the handler's queues, as the consumer itself declares them."""
    project.empty()
    with running([*CONSUMER, "--drain"], project, ends=True) as consumer:
        wait_for_end(consumer, project)

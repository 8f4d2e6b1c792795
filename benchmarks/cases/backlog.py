"""Does a backlog of a million slow the relay down, and does its memory stay flat while it drains it?

Two projects side by side, and in both a relay that has just started: its rate over the first 8,000 messages, once out of 10,000
and once out of a million, which is stopped after them and filled up again. They take a second each, so every run has two
pairs, small large large small. Then, in the last two runs only, because it takes a minute, one relay drains the whole million.
A backlog that slowed it down would make the last 100,000 messages faster than the first, and what it leaves behind would make
them slower. Its memory is sampled four times a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.lab.arrivals import Arrivals, collect, fresh_queue, in_queue
from benchmarks.lab.database import Settled, rate, rate_of_last
from benchmarks.lab.plan import Plan, say
from benchmarks.lab.processes import memory_of, running
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.relays import RELAY, drain_preloaded
from benchmarks.lab.servers import Lab
from benchmarks.lab.verdicts import verdict
from benchmarks.lab.waiting import wait_for, wait_for_end
from benchmarks.lab.workload import many_customers

SMALL, LARGE = "out of a small backlog", "out of a large backlog"
WHOLE = "the whole large backlog at once"
WHOLE_FIRST, WHOLE_LAST = "the first tenth of the whole", "the last tenth of the whole"
WHOLE_RUNS = 2
MILLION = 1e6
FIRST_TRANSACTIONS = 2_000
"""More than both lanes settle at first, which the rate leaves out."""
LOOK_SECONDS = 0.5
"""Between two looks at the queue; more of them would cost the broker what the small backlog's relay has for itself."""


@dataclass
class Large:
    """The project with the large backlog, through all runs.

    Attributes:
        committed: messages ever written.
        arrivals: what was taken off its queue so far.
    """

    project: Project
    committed: int
    arrivals: Arrivals

    @property
    def waiting(self) -> int:
        return self.committed - self.arrivals.taken

    def fill_up(self, backlog: int) -> float:
        """As if it was new: a checkpoint behind it, and a queue of its own; rows per second."""
        missing = backlog - self.waiting
        producer_rate = self.project.database.preload(missing, many_customers, first=self.committed)
        self.committed += missing
        self.project.database.connection.execute("CHECKPOINT")
        fresh_queue(self.project)
        return producer_rate


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    small, large, head = plan.choose(full=(10_000, 1_000_000, 8_000), quick=(4_000, 20_000, 2_000))
    calm = lab.new_project()
    full = Large(lab.new_project(), committed=0, arrivals=Arrivals())
    for run in plan.each_run(record.name):
        for side in (SMALL, LARGE, LARGE, SMALL):
            if side == SMALL:
                record.add(SMALL, drain_preloaded(calm, record, SMALL, small, many_customers, first=head), "msg/s")
            else:
                full.fill_up(large)
                record.add(LARGE, _relay_head(full, head), "msg/s")
        if run > plan.runs - WHOLE_RUNS:
            say(f"{record.name}: draining all of {large:,}")
            record.add("rows written by COPY", full.fill_up(large), "rows/s")
            _drain_all(full, record, tenth=large // 10)
    record.compare(LARGE, SMALL, reach=">= 0.95", name="large / small backlog")
    record.compare(WHOLE_LAST, WHOLE_FIRST, reach="about 1", name="last / first tenth of the whole large one")
    record.note(f"Small: the first {head:,} out of {small:,}. Large: the first {head:,} out of {large:,}; two pairs a run.")
    record.note(f"The whole large one is drained in the last {WHOLE_RUNS} runs only; its verdict is on all runs until then.")
    record.note("Memory is to stay below 150 MB, and its growth near 0.")


def _relay_head(full: Large, head: int) -> float:
    """Let a relay carry at least `head` messages and stop it; messages per second over the first `head`."""
    project = full.project
    since = project.database.now()
    with running([*RELAY, "--drain"], project) as relay:
        wait_for(in_queue(project, head + FIRST_TRANSACTIONS + 1), relay, every=LOOK_SECONDS)
        relay.stop()
    collect(project, full.arrivals)
    return rate(project.database.settled(since), first=head)


def _drain_all(full: Large, record: Record, tenth: int) -> None:
    project = full.project
    since = project.database.now()
    with running([*RELAY, "--drain"], project, ends=True) as relay, memory_of(relay) as samples:
        ended = wait_for_end(relay, project)
    settled = project.database.settled(since)
    record.add(WHOLE, rate(settled), "msg/s")
    record.add(WHOLE_FIRST, rate(settled, first=tenth), "msg/s")
    record.add(WHOLE_LAST, rate_of_last(settled, tenth), "msg/s")
    record.add("memory of that relay, most", ended.most_memory / MILLION, "MB")
    record.add("memory of that relay, growth", _growth(samples, settled), "MB/1M msg")
    record.details.setdefault("memory_samples", []).append(samples)
    record.judge(verdict(project, WHOLE, full.committed, arrivals=full.arrivals, capacity=rate(settled)))


def _growth(samples: list[tuple[float, int]], settled: list[Settled]) -> float:
    """The slope of a straight line through the samples after the first tenth, which is the process growing up."""
    grown_up = samples[len(samples) // 10 :]
    times, sizes = [at for at, _ in grown_up], [size for _, size in grown_up]
    mean_time, mean_size = sum(times) / len(times), sum(sizes) / len(sizes)
    spread = sum((at - mean_time) ** 2 for at in times)
    slope = sum((at - mean_time) * (size - mean_size) for at, size in grown_up) / spread if spread else 0.0
    return slope / rate(settled)

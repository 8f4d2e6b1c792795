"""What does it cost a handler to take the messages of each of 1,000 keys in their order?

Four worker threads on either side, so that there is something to keep in order.
"""

from __future__ import annotations

from benchmarks.lab.deliveries import handled_by
from benchmarks.lab.handling import Bench
from benchmarks.lab.plan import Plan
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab

UNORDERED, ORDERED = "unordered, four threads", "ordered, 1,000 keys, four threads"
THREADS = 4


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    bench = Bench(lab, record, count=plan.choose(full=5_000, quick=2_000))
    unordered, ordered = handled_by(bench.project, "sql"), handled_by(bench.project, "sql", ordered=True)
    sides = {
        UNORDERED: lambda: bench.consume(unordered, UNORDERED, concurrency=THREADS),
        ORDERED: lambda: bench.consume(ordered, ORDERED, concurrency=THREADS, ordered=True),
    }
    bench.alternate(plan, sides)
    record.compare(ORDERED, UNORDERED, reach=">= 0.78", name="ordered / unordered")

"""How much faster is a handler that takes a list than what one writes by hand, for each message and for lists?

The handler writes the rows of a whole batch with one `bulk_create`.
"""

from __future__ import annotations

from benchmarks.lab.deliveries import handled_by
from benchmarks.lab.handling import BULK, HAND_WRITTEN, Bench
from benchmarks.lab.plan import Plan
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab

BATCHES = "bulk handler, size=100"


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    bench = Bench(lab, record, count=plan.choose(full=10_000, quick=3_000))
    in_batches = handled_by(bench.project, "bulk", size=100, wait=0.2)
    sides = {
        HAND_WRITTEN: bench.hand_written,
        BULK: lambda: bench.hand_written(BULK),
        BATCHES: lambda: bench.consume(in_batches, BATCHES),
    }
    bench.alternate(plan, sides)
    record.compare(BATCHES, HAND_WRITTEN, reach=">= 12")
    record.compare(BATCHES, BULK, reach=">= 1.1")

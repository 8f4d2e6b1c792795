"""What does a duplicate take, beside the same written by hand?

All messages have been handled today. The same ones come again, and each is counted on its row and acknowledged. By hand the
receipt is found, and the row is counted by an UPDATE that names its day; content that differs is not found.
"""

from __future__ import annotations

from functools import partial

from benchmarks.lab.deliveries import handled_by
from benchmarks.lab.handling import LEAN, Bench
from benchmarks.lab.plan import Plan
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab

DUPLICATES = "duplicates of a handler"


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    bench = Bench(lab, record, count=plan.choose(full=5_000, quick=1_000))
    project = handled_by(bench.project, "sql")
    sides = {
        LEAN: partial(bench.hand_written, LEAN, again=True),
        DUPLICATES: partial(bench.consume, project, DUPLICATES, again=True),
    }
    bench.alternate(plan, sides)
    record.compare(DUPLICATES, LEAN, reach=">= 0.80")

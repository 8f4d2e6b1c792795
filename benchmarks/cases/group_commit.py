"""How much faster is an ordinary handler when its calls share transactions?"""

from __future__ import annotations

from benchmarks.lab.deliveries import handled_by
from benchmarks.lab.handling import Bench
from benchmarks.lab.plan import Plan
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab

SINGLY, GROUPED = "ORM handler, singly", "ORM handler, group_commit=50"


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    bench = Bench(lab, record, count=plan.choose(full=10_000, quick=1_000))
    singly, grouped = handled_by(bench.project, "orm"), handled_by(bench.project, "orm", group_commit=50)
    sides = {
        SINGLY: lambda: bench.consume(singly, SINGLY),
        GROUPED: lambda: bench.consume(grouped, GROUPED),
    }
    bench.alternate(plan, sides)
    record.compare(GROUPED, SINGLY, reach=">= 4.5", name="group_commit=50 / singly")

"""How close does a handler that publishes one message come to the same written by hand?

As `inbox`, with a message that the handler publishes besides its row: by `publish()`, and by the INSERT of the outbox's row,
which neither checks the message nor wakes a relay. No relay runs.
"""

from __future__ import annotations

from benchmarks.lab.deliveries import handled_by
from benchmarks.lab.handling import PUBLISHING, Bench
from benchmarks.lab.plan import Plan
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab

PUBLISHES = "handler, publishes one message"


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    bench = Bench(lab, record, count=plan.choose(full=5_000, quick=1_000))
    project = handled_by(bench.project, "publish")
    sides = {PUBLISHING: lambda: bench.hand_written(PUBLISHING), PUBLISHES: lambda: bench.consume(project, PUBLISHES)}
    bench.alternate(plan, sides)
    record.compare(PUBLISHES, PUBLISHING, reach=">= 0.90")

"""How long from a publisher's commit until the effect of its message's handler is committed, when nothing else goes on?

One message every 200 to 300 ms through `publish`, `outbox_relay` and `inbox_consume`, all with their defaults. Both instants
are PostgreSQL's own, taken when each commit record was made.
"""

from __future__ import annotations

from benchmarks.cases.latency import Pace, to_handler
from benchmarks.lab.plan import Plan
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab

SIDE = "commit -> effect, idle"


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    idle = Pace(count=plan.choose(full=400, quick=8), shortest=0.2, longest=0.3)
    project = lab.new_project()
    for _ in plan.each_run(record.name):
        to_handler(project, record, SIDE, idle)
    record.note(f"{idle.count} messages a run. p50 is to be at most 6 ms, p99 at most 11 ms.")

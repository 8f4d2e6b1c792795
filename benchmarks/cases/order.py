"""What does the order of keys cost: a thousand keys against none, and one hot key alone?"""

from __future__ import annotations

from benchmarks.lab.plan import Plan
from benchmarks.lab.record import Record
from benchmarks.lab.relays import drain_preloaded
from benchmarks.lab.servers import Lab
from benchmarks.lab.workload import many_customers, no_customer, one_customer

MANY, NONE, HOT = "1,000 keys", "no keys", "one hot key"


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    count = plan.choose(full=20_000, quick=3_000)
    hot_count = plan.choose(full=5_000, quick=700)
    project = lab.new_project()
    for _ in plan.each_run(record.name):
        for side, messages, keys in ((MANY, count, many_customers), (NONE, count, no_customer), (HOT, hot_count, one_customer)):
            record.add(side, drain_preloaded(project, record, side, messages, keys), "msg/s")
    record.compare(MANY, NONE, reach="about 1")
    record.compare(HOT, NONE)
    record.note(f"The hot key is to reach 2,500 msg/s. {count:,} messages a run, {hot_count:,} of the hot key.")

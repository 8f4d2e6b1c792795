"""What do a second and a third relay process add?

The relays are connected and idle when the whole backlog is committed at once, so that none of them has a head start; the clock
runs from that commit to the end of the last relay's last transaction. They poll every 20 ms here, because a backlog that is
copied in rings no doorbell.
"""

from __future__ import annotations

from benchmarks.lab.arrivals import fresh_queue, in_queue
from benchmarks.lab.plan import Plan
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.relays import relaying
from benchmarks.lab.servers import Lab
from benchmarks.lab.verdicts import verdict
from benchmarks.lab.waiting import wait_for
from benchmarks.lab.workload import many_customers

SIDES = {1: "one relay", 2: "two relays", 3: "three relays"}
POLL_SECONDS = 0.02


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    count = plan.choose(full=40_000, quick=5_000)
    project = lab.new_project()
    for _ in plan.each_run(record.name):
        for relays, side in SIDES.items():
            _drain_together(project, record, side, relays, count)
    record.compare(SIDES[2], SIDES[1])
    record.compare(SIDES[3], SIDES[1])
    record.note(f"{count:,} messages a run. On two processors the servers and the relays compete for the same two.")


def _drain_together(project: Project, record: Record, side: str, relays: int, count: int) -> None:
    database = project.database
    project.empty()
    fresh_queue(project)
    with relaying(project, relays, POLL_INTERVAL=POLL_SECONDS) as processes:
        with database.uncommitted(count, many_customers):
            pass
        began = database.now()
        wait_for(in_queue(project, count), *processes)
    capacity = count / (database.settled()[-1].at - began)
    record.add(side, capacity, "msg/s")
    record.judge(verdict(project, side, count, capacity=capacity))

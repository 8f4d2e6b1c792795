"""Do a million messages that are scheduled for later slow the relay down on those that are ready?

Two projects side by side; one has a million messages in its outbox that are due in an hour to a month. In both the same number
of ready messages is committed, and one relay carries them, its wheel turning beside it. They take a second or two, so every run
has four pairs, each second one in the opposite order. What was carried is deleted and vacuumed before the next block.
"""

from __future__ import annotations

from benchmarks.lab.arrivals import fresh_queue, in_queue
from benchmarks.lab.database import rate
from benchmarks.lab.plan import Plan, say
from benchmarks.lab.processes import running
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.relays import RELAY
from benchmarks.lab.scheduled import schedule_far
from benchmarks.lab.servers import Lab
from benchmarks.lab.verdicts import verdict
from benchmarks.lab.waiting import wait_for
from benchmarks.lab.workload import many_customers

NONE, MILLION = "none scheduled", "a million scheduled"
PAIRS = ((NONE, MILLION), (MILLION, NONE))
LOOK_SECONDS = 0.25


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    far, count, times = plan.choose(full=(1_000_000, 12_000, 2), quick=(20_000, 3_000, 1))
    projects = {NONE: lab.new_project(), MILLION: lab.new_project()}
    scheduled = {NONE: 0, MILLION: far}
    say(f"{record.name}: scheduling {far:,} for later")
    record.add("rows scheduled by COPY", schedule_far(projects[MILLION].database, far), "rows/s")
    for _ in plan.each_run(record.name):
        for pair in PAIRS * times:
            for side in pair:
                _carry(projects[side], record, side, count, scheduled[side])
    record.compare(MILLION, NONE, reach=">= 0.95", name="a million scheduled / none")
    record.note(f"{count:,} ready messages a block, {len(PAIRS) * times} pairs a run; a million is {far:,} here.")


def _carry(project: Project, record: Record, side: str, count: int, not_due: int) -> None:
    database = project.database
    database.sweep()
    producer_rate = database.preload(count, many_customers)
    database.connection.execute("CHECKPOINT")
    fresh_queue(project)
    with running(RELAY, project) as relay:
        wait_for(in_queue(project, count), relay, every=LOOK_SECONDS)
        relay.stop()
    capacity = rate(database.settled())
    record.add(side, capacity, "msg/s")
    record.judge(verdict(project, side, count, producer_rate=producer_rate, capacity=capacity, not_due=not_due))

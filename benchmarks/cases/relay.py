"""How close does one relay process come to publishing the same messages with no database at all?"""

from __future__ import annotations

from benchmarks.lab.actors import act
from benchmarks.lab.arrivals import fresh_queue
from benchmarks.lab.plan import Plan
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.relays import drain_preloaded
from benchmarks.lab.servers import Lab
from benchmarks.lab.verdicts import verdict
from benchmarks.lab.workload import many_customers

RAW = "raw py-amqp, window of 1,000"
TRANSPORT = "the outbox's transport, one lane"
LANES = "the outbox's transport, two lanes"
FASTEST = "the fastest of these three"
RELAY = "outbox_relay"
SENDERS = {RAW: "raw", TRANSPORT: "transport", LANES: "lanes"}


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    count = plan.choose(full=20_000, quick=3_000)
    project = lab.new_project()
    sides = [*SENDERS, RELAY]
    for run in plan.each_run(record.name):
        rates = {side: _rate(project, record, side, count) for side in (sides if run % 2 else reversed(sides))}
        for side in SENDERS:
            record.add(side, rates[side], "msg/s")
        record.add(FASTEST, max(rates[side] for side in SENDERS), "msg/s")
        record.add(RELAY, rates[RELAY], "msg/s")
    record.compare(RELAY, LANES, reach=">= 0.68", name="relay / transport, two lanes")
    record.compare(RELAY, FASTEST, name="relay / the fastest of these")
    record.compare(RELAY, RAW, reach=">= 0.80", name="relay / raw")
    record.compare(TRANSPORT, RAW, name="transport, one lane / raw")
    record.note(f"{count:,} preloaded messages a run; the relay from when both lanes have ended their first transaction.")


def _rate(project: Project, record: Record, side: str, count: int) -> float:
    """Messages per second."""
    if side == RELAY:
        return drain_preloaded(project, record, RELAY, count, many_customers)
    project.empty()
    project.database.preload(count, many_customers)
    fresh_queue(project)
    answer = act(project, "senders", SENDERS[side])
    record.judge(verdict(project, side, count, relayed=False))
    return float(answer["messages"] / answer["seconds"])

"""What does each step of a pass of the relay take, with one message and with a full batch?

Medians over passes in one process, without other work: waiting for PostgreSQL and the broker included. What is left of a pass
is the Python code between its steps.
"""

from __future__ import annotations

from statistics import median

from benchmarks.lab.actors import act
from benchmarks.lab.arrivals import fresh_queue
from benchmarks.lab.plan import Plan
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab

FULL = 500


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    project = lab.new_project()
    fresh_queue(project)
    for _ in plan.each_run(record.name):
        for messages, passes in ((1, plan.choose(full=200, quick=20)), (FULL, plan.choose(full=40, quick=5))):
            for step, values in act(project, "steps", passes, messages).items():
                record.add(f"{messages}: {step}", median(values), "us")

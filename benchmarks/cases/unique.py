"""What does `unique=True` cost beside 8, 30 and 90 days of history, for a new message and for one that was published before?"""

from __future__ import annotations

from benchmarks.lab.actors import act
from benchmarks.lab.plan import Plan
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab

DAYS = (8, 30, 90)


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    count = plan.choose(full=300, quick=50)
    for _ in plan.each_run(record.name):
        for days in DAYS:
            found = act(lab.new_project(), "unique_publisher", days, count)
            for side, milliseconds in found.items():
                record.add(f"{side}, {days} days", milliseconds, "ms")
    for days in DAYS:
        record.compare(f"new, {days} days", f"plain, {days} days", reach="<= 1.3", name=f"unique / plain, {days} days")
    record.note("Each message is a transaction of its own.")

"""Does a long history in partitions by day slow down duplicates of old messages, or exhaust PostgreSQL's table of locks?

One handled message a day, for 30 and for 400 days; 2,000 duplicates of them are counted by 20 threads.
"""

from __future__ import annotations

from benchmarks.lab.actors import act
from benchmarks.lab.plan import Plan
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab

FEW, MANY = 30, 400
THREADS = 20
ERRORS = "errors of {} days"


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    duplicates = plan.choose(full=2_000, quick=400)
    for _ in plan.each_run(record.name):
        for days in (FEW, MANY):
            found = act(lab.new_project(), "old_duplicates", days, duplicates, THREADS)
            record.add(f"{days} days", found["rate"], "duplicates/s")
            record.add(ERRORS.format(days), float(found["errors"]), "errors")
            for error in found["error"]:
                record.note(f"{days} days: {error}")
    record.compare(f"{MANY} days", f"{FEW} days", reach=">= 0.7", name=f"{MANY} / {FEW} days")
    record.note("To reach: no error with the default max_locks_per_transaction.")

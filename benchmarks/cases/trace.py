"""How many calls of Python functions, modules, moves between modules and round trips to PostgreSQL does a message take?

Counts, not times: they are the same on every machine, so one run of the benchmark is enough. The handlers do nothing.
"""

from __future__ import annotations

from benchmarks.lab.actors import act
from benchmarks.lab.plan import Plan
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    for way, figures in act(lab.new_project(), "paths").items():
        for name, count in figures.items():
            record.add(f"{way}: {name}", count, name)
    record.note("To reach, for a fresh delivery: 105 calls, 18 modules, 48 moves.")
    record.note("To reach: 4 round trips for a first failure, 5 for a retry that fails.")

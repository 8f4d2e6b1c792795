"""How close does a handler behind the inbox come to the same written by hand with kombu and psycopg?

One process and one worker thread on either side, the same prefetch, the same rows in the same tables. The handler writes one
row, once through Django's cursor and once through the ORM. The program written by hand inserts its row of the inbox and settles
it, as the inbox does; a second one inserts it as settled, which is the least that can be done.
"""

from __future__ import annotations

from benchmarks.lab.deliveries import handled_by
from benchmarks.lab.handling import HAND_WRITTEN, LEAN, Bench
from benchmarks.lab.plan import Plan
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab

SQL, ORM = "handler, SQL", "handler, ORM"


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    bench = Bench(lab, record, count=plan.choose(full=5_000, quick=1_000))
    by_sql, by_orm = handled_by(bench.project, "sql"), handled_by(bench.project, "orm")
    sides = {
        LEAN: lambda: bench.hand_written(LEAN),
        HAND_WRITTEN: bench.hand_written,
        SQL: lambda: bench.consume(by_sql, SQL),
        ORM: lambda: bench.consume(by_orm, ORM),
    }
    bench.alternate(plan, sides)
    record.compare(SQL, HAND_WRITTEN, reach=">= 0.97")
    record.compare(ORM, HAND_WRITTEN, reach=">= 1.00")
    record.compare(SQL, LEAN, reach=">= 0.92")

"""What does lease mode cost, with its leases in the database and in Redis, beside the same handler in a transaction?"""

from __future__ import annotations

from functools import partial

from benchmarks.lab.deliveries import handled_by
from benchmarks.lab.handling import Bench
from benchmarks.lab.plan import Plan
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab

IN_TRANSACTION, IN_DATABASE, IN_REDIS = "in a transaction", "lease in the database", "lease in Redis"
TEN_MINUTES = 600


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    bench = Bench(lab, record, count=plan.choose(full=5_000, quick=1_000))
    leased = {"lease": TEN_MINUTES}
    projects = {
        IN_TRANSACTION: handled_by(bench.project, "sql"),
        IN_DATABASE: handled_by(bench.project, "sql", **leased),
        IN_REDIS: handled_by(bench.project, "sql", inbox={"LEASE_STORE": lab.redis.url}, **leased),
    }
    bench.alternate(plan, {side: partial(bench.consume, project, side) for side, project in projects.items()})
    record.compare(IN_DATABASE, IN_TRANSACTION, reach=">= 0.86")
    record.compare(IN_REDIS, IN_TRANSACTION, reach=">= 0.95")
    record.note("Under a lease the handler writes its row in autocommit, as the example of an effect outside the transaction.")

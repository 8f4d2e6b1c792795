"""How many rows does the database read for a scheduled message over its life, from when it is written until it is published?

Read is what PostgreSQL counts of the outbox's table: rows fetched by way of an index, wanted or not, and rows passed in
scans. A thousand messages a second that were scheduled before, as many in a burst, and as many that are published with a delay
of one to two seconds; beside them the same number that is ready when written, at that pace and in a burst; all with others in
the table that are scheduled for later. The index by which a row was found shows the purpose. Rows that are found by their place
(`ctid`), as the relay makes ready, locks and settles them, are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.lab.actors import act, acting
from benchmarks.lab.arrivals import fresh_queue, in_queue
from benchmarks.lab.database import Database
from benchmarks.lab.plan import Plan, say
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.relays import relaying
from benchmarks.lab.scheduled import early, schedule_far, schedule_soon
from benchmarks.lab.servers import Lab
from benchmarks.lab.verdicts import verdict
from benchmarks.lab.waiting import until, wait_for
from benchmarks.lab.workload import TOPICS, many_topics, no_customer

SCHEDULED, BURST, SHORT = "scheduled", "scheduled burst", "short delays"
READY, READY_BURST = "ready", "ready burst"
PER_SECOND, PER_TRANSACTION = 1_000, 10
BURST_SECONDS = 0.02
LOOK_SECONDS = 0.25
SESSIONS_END_SECONDS = 60.0
REPORT_SECONDS = 1.5
"""After this time a process of PostgreSQL that executes a statement reports its counts."""
LEAST_SHOWN = 0.001

COUNTED = """
WITH by_index AS (
    SELECT indexrelname, idx_tup_fetch, idx_tup_read FROM pg_stat_user_indexes WHERE relname = 'outbox_outboxmessage_live'
)
SELECT indexrelname, idx_tup_fetch FROM by_index
UNION ALL SELECT 'entries', (SELECT sum(idx_tup_read) FROM by_index)
UNION ALL SELECT 'all', seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'outbox_outboxmessage_live'
UNION ALL SELECT 'scans', seq_tup_read + idx_tup_fetch - (SELECT sum(idx_tup_fetch) FROM by_index)
    FROM pg_stat_user_tables WHERE relname = 'outbox_outboxmessage_live'
"""
"""Rows by index, entries of indexes, and rows in all; of scans those of the table, and of bitmaps, which no index counts."""
OTHERS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    far, count = plan.choose(full=(200_000, 20_000), quick=(10_000, 3_000))
    project = lab.new_project()
    database = project.database
    say(f"{record.name}: scheduling {far:,} for later")
    schedule_far(database, far)
    writers: dict[str, Callable[[], object]] = {
        SCHEDULED: lambda: schedule_soon(database, count, count / PER_SECOND),
        BURST: lambda: schedule_soon(database, count, BURST_SECONDS),
        SHORT: lambda: act(project, "delaying_publisher", 0, count, PER_SECOND, 0),
        READY: lambda: _feed(project, count),
        READY_BURST: lambda: database.copy(count, no_customer, topics=many_topics),
    }
    for _ in plan.each_run(record.name):
        for side, write in writers.items():
            _count(project, record, side, count, far, write)
    record.note(f"{count:,} messages beside {far:,} that are scheduled for later. What an idle relay reads is in it, too.")
    record.note("To reach: at most 3 rows read for a scheduled message.")


def _count(project: Project, record: Record, side: str, count: int, far: int, write: Callable[[], object]) -> None:
    database = project.database
    database.sweep()
    database.connection.execute("VACUUM (ANALYZE) outbox_outboxmessage")
    fresh_queue(project, TOPICS)
    before = _counted(database)
    with relaying(project) as relays:
        write()
        wait_for(in_queue(project, count), *relays, every=LOOK_SECONDS)
    until("no other session in the database", lambda: not database.value(OTHERS), seconds=SESSIONS_END_SECONDS)
    after = _counted(database)
    read = {what: (after[what] - before[what]) / count for what in after}
    record.add(f"{side}: rows read", read["all"], "rows/msg")
    record.add(f"{side}: index entries", read["entries"], "per msg")
    for index, rows in sorted(read.items()):
        if index not in {"all", "entries"} and rows > LEAST_SHOWN:
            record.add(f"{side}: by {index.removeprefix('outbox_outboxmessage_live_')}", rows, "rows/msg")
    record.judge(verdict(project, side, count, not_due=far, early=early(database)))


def _feed(project: Project, count: int) -> None:
    """So many messages, at a steady pace."""
    with acting(project, "feeder", "ordered") as feeder:
        due = time.monotonic()
        for _ in range(0, count, PER_TRANSACTION):
            feeder.order(messages=PER_TRANSACTION)
            due += PER_TRANSACTION / PER_SECOND
            time.sleep(max(0.0, due - time.monotonic()))
        wait_for(in_queue(project, count), feeder, every=LOOK_SECONDS)


def _counted(database: Database) -> dict[str, int]:
    """The counts of every process; one that has ended reported them at its end."""
    time.sleep(REPORT_SECONDS)
    database.value("SELECT 1")
    time.sleep(REPORT_SECONDS)
    return {what: int(rows) for what, rows in database.connection.execute(COUNTED)}

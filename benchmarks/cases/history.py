"""Does a long history slow the relay down, or what operators look at, and how long does it take to drop a day of it?

Two projects side by side, one of them with a day of ten million published messages, and in both the same relay drains the same
messages, every second time in the opposite order. Then the project with the history gets 100,000 messages that are not due yet,
and `exactly_once_status` and the admin's list are timed in a process that is warm. At last the day is dropped.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import psycopg

from benchmarks.lab.actors import act
from benchmarks.lab.arrivals import fresh_queue
from benchmarks.lab.database import Database, rate
from benchmarks.lab.plan import Plan, say
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.relays import drain
from benchmarks.lab.servers import Lab
from benchmarks.lab.workload import many_customers

NONE, LONG = "without history", "with a long history"
HOURS_AHEAD = 48
COLUMNS = (
    "message_id, topic, biz_id, is_unique, key, shard, priority, state, body, headers, correlation_id, causation_id, "
    "traceparent, attempts, last_error, created_at, available_at, settled_at, day"
)
FILL = f"""
INSERT INTO outbox_outboxmessage_history ({COLUMNS})
SELECT (lpad(to_hex(%(day)s::bigint), 8, '0') || lpad(to_hex(n), 24, '0'))::uuid, topic, 'old-' || n, false, key, n %% 64, 0,
  'published', body, headers, correlation_id, causation_id, traceparent, 1, '', created_at, available_at,
  to_timestamp(%(day)s::int * 86400.0 + n %% 86400), %(day)s::int
FROM (SELECT * FROM outbox_outboxmessage_live LIMIT 1) specimen, generate_series(%(first)s::bigint, %(last)s) n
"""
DEAD_ROWS = "SELECT coalesce(sum(n_dead_tup), 0) FROM pg_stat_user_tables WHERE relname LIKE 'outbox_outboxmessage_history%%'"
MILLION = 1_000_000
SECONDS_OF_A_DAY = 86_400


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    rows, count, live = plan.choose(full=(10 * MILLION, 40_000, 100_000), quick=(100_000, 3_000, 5_000))
    plain, long = lab.new_project(), lab.new_project()
    day = fill(long.database, rows, record)
    for run in plan.each_run(record.name):
        for project in (plain, long) if run % 2 else (long, plain):
            record.add(NONE if project is plain else LONG, _drained(project, count), "msg/s")
    record.compare(LONG, NONE, reach=">= 0.97", name="with / without history")
    long.database.preload(live, many_customers, due=lambda number: time.time() + HOURS_AHEAD * 3600 + number / 1000)
    for name, milliseconds in act(long, "looking").items():
        record.add(name, milliseconds, "ms")
    dropped, waited = _drop(long.database, day)
    record.add("dropping the day", dropped, "ms")
    record.add("of it, a relay waits at most", waited, "ms")
    record.add("dead rows left in history", float(long.database.value(DEAD_ROWS)), "rows")
    record.note(f"{count:,} messages are drained beside {rows:,} rows of history; then {live:,} are live for the pages.")
    record.note("To reach: below 100 ms for status and list, below 1,000 ms for dropping the day, no dead row.")


def fill(database: Database, rows: int, record: Record) -> int:
    """A day of history, so many days ago that no relay has made it, and not so many that one drops it."""
    day = int(database.now()) // SECONDS_OF_A_DAY - 3
    name = f"outbox_outboxmessage_{time.strftime('%Y_%m_%d', time.gmtime(day * SECONDS_OF_A_DAY))}"
    database.connection.execute(
        f"CREATE TABLE IF NOT EXISTS {name} PARTITION OF outbox_outboxmessage_history (PRIMARY KEY (message_id)) "  # type: ignore[arg-type]
        f"FOR VALUES FROM ({day}) TO ({day + 1})"
    )
    database.preload(1, many_customers)
    began = time.perf_counter()
    for first in range(0, rows, MILLION):
        say(f"history: filling it, {first:,} of {rows:,}")
        last = min(first + MILLION, rows) - 1
        database.connection.execute(FILL, {"day": day, "first": first, "last": last})
    record.add("filling the history", rows / (time.perf_counter() - began), "rows/s")
    database.connection.execute("VACUUM (ANALYZE) outbox_outboxmessage")
    database.connection.execute("CHECKPOINT")
    return day


def _drained(project: Project, count: int) -> float:
    database = project.database
    since = database.now()
    database.preload(count, many_customers)
    database.connection.execute("CHECKPOINT")
    fresh_queue(project)
    drain(project)
    settled = database.settled(since)
    arrived = sum(project.queue_lengths().values())
    if not sum(each.rows for each in settled) >= count <= arrived:
        raise ValueError(f"{count} messages were written, {sum(each.rows for each in settled)} settled, and {arrived} arrived")
    return rate(settled)


def _drop(database: Database, day: int) -> tuple[float, float]:
    """How long it takes, files included, and how long what settles messages waits for it, in milliseconds."""
    name = f"outbox_outboxmessage_{time.strftime('%Y_%m_%d', time.gmtime(day * SECONDS_OF_A_DAY))}"
    began = time.perf_counter()
    with ThreadPoolExecutor(1) as pool, psycopg.connect(database.url, autocommit=True) as other:
        dropping = pool.submit(database.connection.execute, f"DROP TABLE {name}")  # type: ignore[arg-type]
        waits = [0.0]
        while not dropping.done():
            asked = time.perf_counter()
            other.execute("BEGIN; LOCK TABLE outbox_outboxmessage_history IN ROW EXCLUSIVE MODE; COMMIT")
            waits.append(time.perf_counter() - asked)
        dropping.result()
    return 1000 * (time.perf_counter() - began), 1000 * max(waits)

"""What does one relayed message cost: processor time, write-ahead log, dead rows, statements?"""

from __future__ import annotations

from psycopg import sql

from benchmarks.lab.arrivals import fresh_queue
from benchmarks.lab.database import LIVE, OUTBOX
from benchmarks.lab.plan import Plan
from benchmarks.lab.processes import cpu_seconds_of_tree
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.relays import drain
from benchmarks.lab.servers import Lab
from benchmarks.lab.verdicts import verdict
from benchmarks.lab.workload import many_customers

MICRO = 1e6


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    count = plan.choose(full=20_000, quick=3_000)
    project = lab.new_project()
    # Vacuum would remove the rows to count.
    project.database.connection.execute(sql.SQL("ALTER TABLE {} SET (autovacuum_enabled = false)").format(LIVE))
    for _ in plan.each_run(record.name):
        _weigh(lab, project, record, count)
    _count_statements(lab, project, record, count)
    record.note("Relay CPU: a whole drain less a drain that finds nothing, so without the start of the interpreter.")
    record.note("WAL: of the drain alone, with no checkpoint in it, so without full-page images. Servers' CPU: 10 ms ticks.")


def _weigh(lab: Lab, project: Project, record: Record, count: int) -> None:
    database = project.database
    project.empty()
    start = drain(project)
    fresh_queue(project)
    log_before = _written(project)
    database.copy(count, many_customers)
    record.add("WAL to write it", (_written(project) - log_before) / count, "bytes/msg")
    database.connection.execute(sql.SQL("VACUUM (ANALYZE) {}").format(OUTBOX))
    log_before, dead_before = _written(project), _dead(project)
    postgres_before, rabbit_before = cpu_seconds_of_tree(lab.postgres.pid), cpu_seconds_of_tree(lab.rabbit.pid)
    ended = drain(project)
    record.add("WAL to relay it", (_written(project) - log_before) / count, "bytes/msg")
    record.add("dead rows left", (_dead(project) - dead_before) / count, "rows/msg")
    record.add("CPU of outbox_relay", (ended.cpu_seconds - start.cpu_seconds) / count * MICRO, "us/msg")
    record.add("CPU of PostgreSQL", (cpu_seconds_of_tree(lab.postgres.pid) - postgres_before) / count * MICRO, "us/msg")
    record.add("CPU of RabbitMQ", (cpu_seconds_of_tree(lab.rabbit.pid) - rabbit_before) / count * MICRO, "us/msg")
    record.judge(verdict(project, "outbox_relay", count))


def _count_statements(lab: Lab, project: Project, record: Record, count: int) -> None:
    """Let the server log every statement of one more drain, and count the lines; nothing is timed here."""
    database = project.database
    project.empty()
    database.preload(count, many_customers)
    fresh_queue(project)
    name = sql.Identifier(str(database.value("SELECT current_database()")))
    database.connection.execute(sql.SQL("ALTER DATABASE {} SET log_statement = 'all'").format(name))
    already = len(lab.postgres.log.read_text(errors="replace"))
    drain(project)
    database.connection.execute(sql.SQL("ALTER DATABASE {} RESET log_statement").format(name))
    new_lines = lab.postgres.log.read_text(errors="replace")[already:].splitlines()
    statements = sum("LOG:  statement: " in line or "LOG:  execute " in line for line in new_lines)
    record.add("statements", statements / count, "per msg")
    record.judge(verdict(project, "outbox_relay", count))


def _written(project: Project) -> int:
    return int(project.database.value("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))


def _dead(project: Project) -> int:
    """Versions of rows that updates and deletes have left behind since the database was made, in all tables."""
    return int(project.database.value("SELECT sum(n_tup_upd + n_tup_del) FROM pg_stat_user_tables"))

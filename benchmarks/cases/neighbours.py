"""How long does a message of another topic wait beside a paused topic of a million keys, and beside a burst of due messages?

The other topic has 20 messages a second, each in its own transaction: alone; beside a million messages of as many keys, whose
topic an operator has paused; and beside 60,000 of one topic that fall due at once. Measured is the time from the statement that
writes a message until it is settled as published, by the clock of the database.
"""

from __future__ import annotations

import sys

from benchmarks.lab.actors import acting
from benchmarks.lab.arrivals import fresh_queue
from benchmarks.lab.plan import Plan, say
from benchmarks.lab.processes import running
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record, Verdict, percentile
from benchmarks.lab.relays import relaying
from benchmarks.lab.servers import Lab
from benchmarks.lab.waiting import until, wait_for_end
from benchmarks.lab.workload import TOPIC, TOPICS, no_customer

ALONE, PAUSED, BURST = "alone", "beside a paused topic", "beside a burst"
OTHER = TOPICS[1]
PAUSE = [sys.executable, "manage.py", "outbox_pause", OTHER]
SECONDS_BETWEEN = 0.05
AHEAD_SECONDS = 10.0
"""A relay takes less to start."""
SETTLE_SECONDS = 120.0
PERCENTS = (50, 99)
COLUMNS = (
    "message_id, topic, biz_id, is_unique, key, shard, priority, state, body, headers, correlation_id, causation_id, "
    "traceparent, attempts, last_error, created_at, available_at, ready_position, day"
)
HOLD = f"""
INSERT INTO outbox_outboxmessage_live ({COLUMNS})
SELECT lpad(to_hex(n), 32, '0')::uuid, '{OTHER}', 'held-' || n, false, 'held-' || n, n %% 64, 0, 'paused', body, headers,
  correlation_id, causation_id, traceparent, 0, '', created_at, available_at, 0, 0
FROM (SELECT * FROM outbox_outboxmessage_live LIMIT 1) specimen, generate_series(1, %s) n
"""
LATENCIES = """
SELECT extract(epoch FROM settled_at - created_at)::float8 * 1000 FROM outbox_outboxmessage_history
WHERE topic = %s AND state = 'published' AND created_at > to_timestamp(%s)
"""
LEFT = "SELECT count(*) FROM outbox_outboxmessage_live WHERE topic = %s"


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    held, due, count = plan.choose(full=(1_000_000, 60_000, 600), quick=(20_000, 5_000, 300))
    project = lab.new_project()
    for _ in plan.each_run(record.name):
        project.empty()
        _publish(project, record, ALONE, count)
        say(f"{record.name}: {held:,} keys of a paused topic")
        project.empty()
        _hold(project, held)
        _publish(project, record, PAUSED, count)
        say(f"{record.name}: {due:,} due at once")
        project.empty()
        _publish(project, record, BURST, count, since=_schedule(project, due, first=count))
    record.note(f"{count:,} messages beside {held:,} held keys, and beside {due:,} that are due at once.")
    record.note("To reach: p99 at most 1,000 ms each.")


def _hold(project: Project, held: int) -> None:
    """A paused topic that has a message of each of so many keys."""
    database = project.database
    database.preload(1, lambda number: "held", topics=lambda number: OTHER)
    database.connection.execute(HOLD, [held])  # type: ignore[arg-type]
    database.connection.execute("VACUUM (ANALYZE) outbox_outboxmessage")
    with running(PAUSE, project, ends=True) as pausing:
        wait_for_end(pausing, project)


def _schedule(project: Project, due: int, *, first: int) -> float:
    """So many messages that are due at one instant, soon; the instant."""
    at = project.database.now() + AHEAD_SECONDS
    project.database.preload(due, no_customer, first=first, topics=lambda number: OTHER, due=lambda number: at)
    return at


def _publish(project: Project, record: Record, side: str, count: int, *, since: float = 0.0) -> None:
    database = project.database
    fresh_queue(project, [TOPIC, OTHER])
    with relaying(project) as relays:
        with acting(project, "steady_publisher", count, 1, SECONDS_BETWEEN, SECONDS_BETWEEN) as publisher:
            publisher.finish()
        until("every message is settled", lambda: not database.value(LEFT, TOPIC), *relays, seconds=SETTLE_SECONDS)
    took = [float(milliseconds) for (milliseconds,) in database.connection.execute(LATENCIES, [TOPIC, since])]  # type: ignore[arg-type]
    for percent in PERCENTS:
        record.add(f"{side}, p{percent}", percentile(took, percent), "ms")
    record.add(f"{side}, last", max(took), "ms")
    settled = int(database.value("SELECT count(*) FROM outbox_outboxmessage_history WHERE topic = %s", TOPIC))
    record.judge(Verdict(side=side, correct=settled == count, detail=f"{count:,} committed, {settled:,} settled"))

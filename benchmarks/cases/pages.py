"""How long do the overview and the lists of the admin take with ten million messages of history and a million live ones?

The outbox has a day of published messages and live messages that are scheduled, retrying, dead and ready; the inbox has a tenth
as many rows; and both have the statistics of eight days, of two processes and ten topics or handlers. Each page is rendered
completely, in a process that is warm. The plans of the overview's queries are kept.
"""

from __future__ import annotations

import time

from benchmarks.actors.browsing import PAGES
from benchmarks.cases.history import HOURS_AHEAD, MILLION, _fill
from benchmarks.lab.actors import act
from benchmarks.lab.plan import Plan, say
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab
from benchmarks.lab.workload import many_customers

MINUTES = 8 * 24 * 60
SOME_DEAD, SOME_RETRYING, SOME_READY = 1000, 5000, 2000
UNDO_SCHEDULE = """
UPDATE outbox_outboxmessage_live SET state = %(state)s, available_at = statement_timestamp() - interval '1 minute'
WHERE id IN (SELECT id FROM outbox_outboxmessage_live WHERE state = 'scheduled' ORDER BY id LIMIT %(count)s)
"""
HANDLED = """
INSERT INTO inbox_inboxmessage (handler, topic, biz_id, message_id, key, state, content_type, body, digest, headers, source,
  correlation_id, causation_id, traceparent, received_at, settled_at, next_attempt_at, last_error)
SELECT 'shop.handler-' || n %% 10, 'bench.topic', 'old-' || n, n, '', CASE WHEN n < %(dead)s THEN 'dead' ELSE 'done' END,
  'application/json', convert_to(repeat('x', 200), 'UTF8'), '', '{}', '', '', '', '', statement_timestamp(),
  statement_timestamp(), NULL, ''
FROM generate_series(0, %(rows)s - 1) n
"""
STATISTICS = """
INSERT INTO {table} (minute, process, subject, {columns})
SELECT date_trunc('minute', statement_timestamp()) - make_interval(mins => minute), 'host:' || process, subject, {values}
FROM generate_series(0, %(minutes)s - 1) minute, generate_series(1, 2) process,
  (SELECT '' AS subject UNION ALL SELECT 'shop.name-' || n FROM generate_series(1, 10) n) subjects
"""
HISTOGRAM = """'{"8": 40, "9": 300, "10": 200, "11": 50, "14": 5, "17": 1}'"""


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    rows, live = plan.choose(full=(10 * MILLION, MILLION), quick=(100_000, 10_000))
    project = lab.new_project()
    database = project.database
    _fill(database, rows, record)
    say("pages: live messages, the inbox and statistics")
    database.preload(live, many_customers, due=lambda number: time.time() + HOURS_AHEAD * 3600 + number / 1000)
    for state, count in (("dead", SOME_DEAD), ("retrying", SOME_RETRYING), ("ready", SOME_READY)):
        database.connection.execute(UNDO_SCHEDULE, {"state": state, "count": count})
    database.connection.execute(HANDLED, {"rows": rows // 10, "dead": SOME_DEAD})
    for table, columns, values in (
        ("outbox_minutestatistics", "published, retried, dead, expired, to_broker", f"600, 3, 0, 0, {HISTOGRAM}"),
        (
            "inbox_minutestatistics",
            "handled, failed, deferred, dead, redeliveries, resends, replays, repeats, to_inbox, to_effect",
            f"600, 3, 1, 0, 1, 1, 0, 2, {HISTOGRAM}, {HISTOGRAM}",
        ),
    ):
        statement = STATISTICS.format(table=table, columns=columns, values=values)
        database.connection.execute(statement, {"minutes": MINUTES})  # type: ignore[arg-type]
    database.connection.execute("VACUUM (ANALYZE)")
    for _ in plan.each_run(record.name):
        for name in PAGES:
            record.add(name, act(project, "browsing", name), "ms")
    record.details["plans of the overview"] = act(project, "browsing")
    record.note(f"{rows:,} published messages of history, {live:,} live ones, {rows // 10:,} in the inbox.")
    record.note("To reach: below 200 ms for the overview and the lists, at the median.")

"""How long do the pages of the admin take with ten million messages of history and a million live ones?

The outbox has a day of published messages and live messages that are scheduled, retrying, dead and ready; the inbox has a tenth
as many rows and as many receipts; and both have the statistics of eight days, of two processes and ten topics or handlers. Each
page is rendered completely, in a process that is warm. The plans of the queries of each page are kept, as they are run.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.actors.browsing import PAGES
from benchmarks.cases.history import MILLION, fill
from benchmarks.lab.actors import acting
from benchmarks.lab.plan import Plan, say
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab

MINUTES = 8 * 24 * 60
SOME_DEAD, SOME_RETRYING, SOME_READY = 1000, 5000, 2000
LONGEST_PAGE_SECONDS = 600.0
"""For all of its visits."""
LIVE = """
INSERT INTO outbox_outboxmessage_live (message_id, topic, biz_id, is_unique, key, shard, priority, state, body, headers,
  correlation_id, causation_id, traceparent, attempts, last_error, error_class, failing_since, failed_at, created_at,
  available_at)
SELECT (lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint), 12, '0') || lpad(to_hex(n), 20, '0'))::uuid, topic,
  'live-' || n, false, '', n %% 64, 0, state, body, headers, correlation_id, causation_id, traceparent,
  CASE WHEN fails THEN 3 ELSE 0 END, CASE WHEN fails THEN 'the broker refused it' ELSE '' END,
  CASE WHEN fails THEN 'nacked' ELSE '' END, CASE WHEN fails THEN now() END, CASE WHEN fails THEN now() END,
  now() - interval '1 hour', CASE state WHEN 'ready' THEN now() - interval '1 hour'
    ELSE now() + interval '48 hours' + n * interval '1 millisecond' END
FROM (SELECT topic, body, headers, correlation_id, causation_id, traceparent FROM outbox_outboxmessage_live LIMIT 1) specimen,
  (SELECT n, state, state IN ('dead', 'retrying') AS fails FROM (
    SELECT n, CASE WHEN n < %(dead)s THEN 'dead' WHEN n < %(dead)s + %(retrying)s THEN 'retrying'
      WHEN n < %(dead)s + %(retrying)s + %(ready)s THEN 'ready' ELSE 'scheduled' END AS state
    FROM generate_series(0, %(rows)s - 1) n) states) numbered
"""
HANDLED = """
INSERT INTO inbox_inboxmessage (id, handler, topic, biz_id, message_id, key, state, content_type, body, digest, headers, source,
  correlation_id, causation_id, traceparent, received_at, settled_at, last_error, error_class, failing_since, day)
SELECT nextval('inbox_receipt_id_seq'), 'shop.handler-' || n %% 10, 'bench.topic', 'old-' || n, n, '',
  CASE WHEN n < %(dead)s THEN 'dead' ELSE 'done' END,
  'application/json', convert_to(repeat('x', 200), 'UTF8'), '', '{}', '', '', '', '',
  now() - n * interval '100 milliseconds', now() - n * interval '100 milliseconds',
  CASE WHEN n < %(dead)s THEN 'ValueError: no stock' ELSE '' END, CASE WHEN n < %(dead)s THEN 'ValueError' ELSE '' END,
  CASE WHEN n < %(dead)s THEN now() END,
  CASE WHEN n < %(dead)s THEN 0 ELSE floor(extract(epoch FROM now()) / 86400) - n %% 7 END
FROM generate_series(0, %(rows)s - 1) n
"""
RECEIPTS = """
INSERT INTO inbox_receipt (id, handler, topic, biz_id, message_id, digest, received_at)
SELECT id, handler, topic, biz_id, message_id, digest, received_at FROM inbox_inboxmessage UNION ALL
SELECT nextval('inbox_receipt_id_seq'), 'shop.handler-' || n %% 10, 'bench.topic', 'older-' || n, n::text, '',
  now() - interval '30 days'
FROM generate_series(1, %(older)s) n
"""
"""Those of the messages, and of messages whose history has been dropped."""
STATISTICS = """
INSERT INTO exactly_once_minute (app, minute, process, subject, counts, times)
SELECT %(app)s, date_trunc('minute', now()) - make_interval(mins => minute), 'host:' || process, subject, %(counts)s, %(times)s
FROM generate_series(0, %(minutes)s - 1) minute, generate_series(1, 2) process,
  (SELECT '' AS subject UNION ALL SELECT 'shop.name-' || n FROM generate_series(1, 10) n) subjects
"""
HISTOGRAM = {"8": 40, "9": 300, "10": 200, "11": 50, "14": 5, "17": 1}


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    rows, live = plan.choose(full=(10 * MILLION, MILLION), quick=(100_000, 10_000))
    rows, live = plan.history or rows, plan.live or live
    project = lab.new_project()
    _fill(project, rows, live, record)
    plans: dict[str, Any] = {}
    for _ in plan.each_run(record.name):
        with acting(project, "browsing") as browsing:
            for name in PAGES:
                page = browsing.answer(LONGEST_PAGE_SECONDS)
                record.add(name, page["milliseconds"], "ms")
                plans[name] = page["plans"]
    record.details["plans"] = plans
    record.note(
        f"{rows:,} published messages of history, {live:,} live ones, {rows // 10:,} and {rows:,} receipts in the inbox."
    )
    record.note("To reach: below 200 ms for each page, at the median.")


def _fill(project: Project, rows: int, live: int, record: Record) -> None:
    database = project.database
    fill(database, rows, record)
    say("pages: live messages, the inbox and statistics")
    some = {"dead": SOME_DEAD, "retrying": SOME_RETRYING, "ready": SOME_READY}
    database.connection.execute(LIVE, {"rows": live, **some})
    database.connection.execute(HANDLED, {"rows": rows // 10, "dead": SOME_DEAD})
    database.connection.execute(RECEIPTS, {"older": rows - rows // 10})
    for app, counts, times in (
        ("outbox", {"published": 600, "retried": 3}, ("to_broker",)),
        (
            "inbox",
            {"handled": 600, "failed": 3, "deferred": 1, "redeliveries": 1, "resends": 1, "repeats": 2},
            ("to_inbox", "to_effect"),
        ),
    ):
        given = {"counts": json.dumps(counts), "times": json.dumps(dict.fromkeys(times, HISTOGRAM))}
        database.connection.execute(STATISTICS, {"app": app, "minutes": MINUTES, **given})
    database.connection.execute("VACUUM (ANALYZE)")

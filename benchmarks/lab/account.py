"""What has become of a project's messages, in one line: for the error of a benchmark that cannot go on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from benchmarks.lab.project import ROOT, Project
from benchmarks.lab.workload import PAST

OUTBOX_STATES = "SELECT state, count(*) FROM outbox_outboxmessage GROUP BY state ORDER BY state"
INBOX_STATES = f"""
SELECT state, count(*) FROM inbox_inboxmessage WHERE NOT starts_with(biz_id, '{PAST}') GROUP BY state
UNION ALL SELECT 'duplicates', coalesce(sum(duplicates), 0) FROM inbox_inboxmessage
"""
TABLES = {"outbox rows": ("outbox_outboxmessage", OUTBOX_STATES), "inbox rows": ("inbox_inboxmessage", INBOX_STATES)}
STATUS_SECONDS = 30.0


def account(project: Project) -> str:
    parts = {name: _counted(project, *query) for name, query in TABLES.items()}
    parts["under leases, without a row"] = _without_rows(project)
    parts["queues"] = project.queue_lengths()
    return "; ".join(f"{name}: {_listed(counts)}" for name, counts in parts.items() if counts is not None)


def _counted(project: Project, table: str, query: str) -> dict[str, int] | None:
    """None for a peer, which has no such table."""
    if project.database.value("SELECT to_regclass(%s)", table) is None:
        return None
    return {name: int(count) for name, count in project.database.connection.execute(query)}


def _without_rows(project: Project) -> dict[str, int] | None:
    """What the status reports about leases in Redis: messages handled, and duplicates of them. None: nothing is known."""
    if not project.redis.is_running:
        return None
    command = [sys.executable, "manage.py", "exactly_once_status", "--app", "inbox", "--json"]
    try:
        answer = subprocess.run(
            command, cwd=ROOT, env=project.environ(), capture_output=True, timeout=STATUS_SECONDS, check=True
        )
    except subprocess.SubprocessError:
        return None
    counts = (json.loads(answer.stdout)["inbox"]["without_rows"] or {}).values()
    return {what: sum(of_handler.get(what, 0) for of_handler in counts) for what in ("handled", "duplicates")}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "none"

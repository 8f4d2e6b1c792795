"""The status command of both apps: `outbox_status` and `inbox_status`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS

from outbox.console.terminal import age, table, watch
from outbox.database.schema import require_schema
from outbox.kernel.loop import StopRequest, running_until_signalled

_REDRAW_SECONDS = 2.0


class StatusCommand(BaseCommand):
    """See the module's docstring."""

    app: str

    def as_json(self, alias: str, options: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def drawn(self, alias: str, options: dict[str, Any]) -> str:
        raise NotImplementedError

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias to look at (default: %(default)s)")
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument("--watch", action="store_true", help="redraw every two seconds until Ctrl-C")

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        require_schema(alias, self.app)
        draw = partial(self.drawn, alias, options)
        if options["json"]:
            self.stdout.write(json.dumps(self.as_json(alias, options)))
        elif options["watch"]:
            with running_until_signalled(StopRequest()) as stop:
                watch(draw, self.stdout.write, _REDRAW_SECONDS, stop)
        else:
            self.stdout.write(draw())


def iso(instant: datetime | None) -> str | None:
    return instant.isoformat() if instant else None


def process_as_json(process: Any, **particular: Any) -> dict[str, Any]:
    """A heartbeat, with the particular fields of its kind of process."""
    return {
        "id": str(process.id),
        "host": process.host,
        "pid": process.pid,
        "version": process.version,
        "started": iso(process.started_at),
        "beat": iso(process.beat_at),
        **particular,
        "waits_for": process.waits_for,
        "silent": process.silent,
    }


def processes(
    kind: str, heartbeats: Sequence[Any], columns: Sequence[tuple[str, Callable[[Any], str]]], state: Callable[[Any], str]
) -> str:
    """A line for each process: the common fields of a heartbeat, those of its kind, and its state."""
    head = (kind, "version", "started", "heartbeat", *(title for title, _ in columns))
    lines = [
        (
            f"{process.host}:{process.pid}",
            process.version,
            age(process.started_at, process.database_now),
            age(process.beat_at, process.database_now),
            *(cell(process) for _, cell in columns),
        )
        for process in heartbeats
    ]
    # The state may contain a sentence (`waits_for`), too long for a column.
    states = ["state", *map(state, heartbeats)]
    return "\n".join(f"{line}  {last}" for line, last in zip(table([head, *lines]).splitlines(), states, strict=True))


def state_of(process: Any) -> str:
    if process.silent:
        return "silent"
    return f"waits for {process.waits_for}" if process.waits_for else "working"

"""The status command of both apps: `outbox_status` and `inbox_status`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from django.core.management.base import CommandParser
from django.db import DEFAULT_DB_ALIAS
from django.utils.translation import gettext as _

from exactly_once.cli.command import TranslatedCommand
from exactly_once.cli.live_view import LiveView, Rates
from exactly_once.cli.terminal import age, fitted, table
from exactly_once.process.loop import StopRequest, running_until_signalled
from exactly_once.sql.schema import require_schema

_REDRAW_SECONDS = 2.0


class StatusCommand(TranslatedCommand):
    """See the module's docstring."""

    app: str
    _rates: Rates | None = None

    def as_json(self, alias: str, options: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def drawn(self, alias: str, options: dict[str, Any]) -> str:
        raise NotImplementedError

    def alarming(self) -> Sequence[str]:
        """Patterns of lines that --watch shows in red."""
        return ()

    def remarkable(self) -> Sequence[str]:
        """Patterns of lines that --watch shows in yellow."""
        return ()

    def with_rates(self, counts: Mapping[str, int], shown: Mapping[str, str]) -> list[tuple[str, ...]]:
        """Lines of a table: each name, how its count is shown and, with --watch, how fast it changes."""
        if self._rates is None:
            return [(name, text) for name, text in shown.items()]
        return [(name, text, self._rates.of(name, counts[name])) for name, text in shown.items()]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias to look at (default: %(default)s)"))
        parser.add_argument("--json", action="store_true", help=_("print one JSON object"))
        parser.add_argument("--watch", action="store_true", help=_("redraw every two seconds, with rates, until q or Ctrl-C"))

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        require_schema(alias, self.app)
        draw = partial(self.drawn, alias, options)
        if options["json"]:
            self.stdout.write(json.dumps(self.as_json(alias, options)))
        elif options["watch"]:
            self._rates = Rates()
            view = LiveView(
                draw,
                title=_("%(command)s of %(alias)s, every %(seconds)d s; q ends it")
                % {"command": f"{self.app}_status", "alias": repr(alias), "seconds": _REDRAW_SECONDS},
                every_seconds=_REDRAW_SECONDS,
                alarming=self.alarming(),
                remarkable=self.remarkable(),
            )
            with running_until_signalled(StopRequest()) as stop:
                view.run(stop)
        else:
            self.stdout.write(fitted(draw(), self.stdout))


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
    kind: str, heartbeats: Sequence[Any], columns: Sequence[tuple[object, Callable[[Any], str]]], state: Callable[[Any], str]
) -> str:
    """A line for each process: the common fields of a heartbeat, those of its kind, and its state."""
    head = (kind, _("version"), _("started"), _("heartbeat"), *(title for title, _ in columns))
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
    states = [_("state"), *map(state, heartbeats)]
    return "\n".join(f"{line}  {last}" for line, last in zip(table([head, *lines]).splitlines(), states, strict=True))


def state_of(process: Any) -> str:
    if process.silent:
        return _("silent")
    return _("waits for %(what)s") % {"what": process.waits_for} if process.waits_for else _("working")

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any, ClassVar

from django.core.management.base import CommandParser
from django.db import connections
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.halves import HalvesCommand, process_as_json, process_table, running
from exactly_once.console.cli.terminal import DIM, RED, Table, coloured, console_on, plain, sentence, show
from exactly_once.console.operators.clock_ahead import ahead
from exactly_once.half import Half
from exactly_once.process.clock import monotonic
from exactly_once.process.loop import StopRequest, running_until_signalled
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.wire.text import describe, visible

_REDRAW_SECONDS = 2.0


class Command(HalvesCommand):
    owners: ClassVar = {"conflicts": "inbox"}
    help = gettext_lazy(
        "Show the number of messages in each state and the age of the oldest waiting one in the outbox and in the inbox, the "
        "pending callbacks, what is paused, and the running processes."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        form = parser.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help=_("print one JSON object"))
        form.add_argument("--watch", action="store_true", help=_("show it again every two seconds, with rates, until Ctrl-C"))
        parser.add_argument(
            "--conflicts",
            action="store_true",
            help=_("only the inbox, and list the messages with the most recent duplicates of different content"),
        )

    def act(self, chosen: list[Half], options: dict[str, Any]) -> None:
        if options["json"]:
            found = {half.app: _as_json(half, options) for half in chosen}
            self.stdout.write(json.dumps(found, default=datetime.isoformat))
        elif options["watch"]:
            self._watch(chosen, options)
        else:
            show(list(_tables(chosen, options, lambda _name, _count: "")), self.stdout)

    def _watch(self, chosen: list[Half], options: dict[str, Any]) -> None:
        rates, words = Rates(), _("%(command)s of %(alias)s, every %(seconds)d s; Ctrl-C ends it")
        named = {"command": "exactly_once_status", "alias": repr(options["database"]), "seconds": _REDRAW_SECONDS}
        view = LiveView(lambda: list(_tables(chosen, options, rates)), title=words % named, every_seconds=_REDRAW_SECONDS)
        with running_until_signalled(StopRequest()) as stop:
            view.run(stop)


def _as_json(half: Half, options: dict[str, Any]) -> dict[str, Any]:
    alias = options["database"]
    figures = half.status.figures(alias, conflicts=options["conflicts"])
    figures["ahead_of_the_clock"] = [
        {"table": found.table, "rows": found.number, "seconds": found.by.total_seconds(), "statement": found.mend}
        for found in ahead(alias, half.dated)
    ]
    return {**figures, f"{half.kind}s": [process_as_json(process) for process in running(half, alias)]}


def _tables(chosen: list[Half], options: dict[str, Any], rates: Any) -> Iterator[Table]:
    alias = options["database"]
    for half in chosen:
        yield from half.status.tables(alias, rates, conflicts=options["conflicts"])
        if processes := running(half, alias):
            yield process_table(processes, brief=True)
        for found in ahead(alias, half.dated):
            yield sentence(_("%(problem)s To make them due now: %(mend)s") % {"problem": found, "mend": found.mend}, RED)
        if missing := half.missing(alias):
            yield sentence(missing, RED)


class Rates:
    """How fast counts change from one drawing to the next. The first drawing has no rate."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}

    def __call__(self, name: str, count: float) -> str:
        """ "+12.5/s", "-3.0/s", or "" if it is unknown or nothing changed."""
        now = monotonic()
        before, self._before[name] = self._before.get(name), (now, count)
        if before is None or now <= before[0] or count == before[1]:
            return ""
        return f"{(count - before[1]) / (now - before[0]):+,.1f}/s"


class LiveView:
    """Shows `read()` every `every_seconds` until it is asked to stop.

    The tables are read on a thread of its own, so that a signal ends the view also while a database does not answer. A failed
    reading leaves the last tables, below a line that says why. On a terminal `rich` draws them; otherwise plain texts follow
    each other.
    """

    def __init__(self, read: Callable[[], Sequence[Table]], *, title: str, every_seconds: float) -> None:
        self._read = read
        self._title = title
        self._every_seconds = every_seconds
        self._tables: Sequence[Table] = ()
        self._failing_since: float | None = None
        self._problem = ""

    def run(self, stop: StopRequest) -> None:
        threading.Thread(target=self._keep_reading, args=[stop], name="reader", daemon=True).start()
        screen: Any = nullcontext()
        if console := console_on(sys.stdout):
            from rich.live import Live  # noqa: PLC0415 - as in console_on()

            screen = Live(console=console, screen=True, refresh_per_second=1, get_renderable=lambda: coloured(self._page()))
        with screen:
            while not stop.wait(self._every_seconds):
                if console is None:
                    sys.stdout.write(f"{visible(plain(self._page()))}\n\n")
                    sys.stdout.flush()

    def _keep_reading(self, stop: StopRequest) -> None:
        try:
            while not stop:
                self._read_once()
                stop.wait(self._every_seconds)
        finally:
            connections.close_all()

    def _read_once(self) -> None:
        try:
            drop_unusable_connections()
            self._tables = self._read()
            self._failing_since = None
        except Exception as error:  # noqa: BLE001 - whatever it is, it may be over at the next reading
            self._failing_since = self._failing_since or monotonic()
            self._problem = describe(error)
            connections.close_all()

    def _page(self) -> Iterator[Table]:
        yield sentence(self._title, DIM)
        if self._failing_since is not None:
            words = _("Unavailable for %(seconds).0f s, tried again: %(reason)s")
            yield sentence(words % {"seconds": monotonic() - self._failing_since, "reason": self._problem}, RED)
        yield from self._tables

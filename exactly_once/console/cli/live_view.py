"""Tables that are read and shown again and again: `exactly_once_status --watch`.

They are read on a thread of its own, so that a signal ends the view also while a database does not answer. A failed reading
leaves the last tables, below a line that says why. On a terminal `rich` draws them; otherwise plain texts follow each other.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from django.db import connections
from django.utils.translation import gettext as _

from exactly_once.console.cli.terminal import DIM, RED, Table, coloured, console_on, plain, sentence
from exactly_once.process.clock import monotonic
from exactly_once.process.loop import StopRequest
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.wire.text import describe, visible


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
    """Shows `read()` every `every_seconds` until it is asked to stop."""

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

            screen = Live(console=console, screen=True, refresh_per_second=1, get_renderable=self._coloured)
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

    def _coloured(self) -> Any:
        return coloured(self._page())

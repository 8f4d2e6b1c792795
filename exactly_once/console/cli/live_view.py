"""Tables that are drawn again and again in a terminal, like `top`: `exactly_once_status --watch`.

They are read on a thread of its own: "q" and Ctrl-C end the view also while a database does not answer. A failed reading leaves
the last tables on the screen, below a line that says why. Without a terminal, or without `rich`, plain texts follow each other.
"""

import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import connections
from django.utils.translation import gettext as _

from exactly_once.console.cli.terminal import DIM, RED, Table, drawing_on, plain, sentence
from exactly_once.process.clock import monotonic
from exactly_once.process.loop import Bell, StopRequest
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
    """Draws `read()` every `every_seconds` until it is asked to stop, by `stop` or by the key q."""

    def __init__(self, read: Callable[[], Sequence[Table]], *, title: str, every_seconds: float) -> None:
        self._read = read
        self._title = title
        self._every_seconds = every_seconds
        self._bell = Bell()
        self._tables: Sequence[Table] = ()
        self._failing_since: float | None = None
        self._problem = ""

    def run(self, stop: StopRequest) -> None:
        threading.Thread(target=self._keep_reading, args=[stop], name="reader", daemon=True).start()
        drawing = drawing_on(sys.stdout)
        if drawing is None:
            while not stop:
                if self._bell.wait(self._every_seconds, stop):
                    sys.stdout.write(f"{visible(plain([*self._head(), *self._tables]))}\n\n")
                    sys.stdout.flush()
            return
        # The clock in the first line goes on also while a reading takes long.
        with drawing.screen(sys.stdout, lambda: [*self._head(), *self._tables]), _keyboard() as keys:
            while not stop:
                self._bell.wait(self._every_seconds, stop, also=keys)
                if keys and select.select([keys], [], [], 0)[0] and _is_end(keys):
                    stop.set()

    def _keep_reading(self, stop: StopRequest) -> None:
        try:
            while not stop:
                self._read_once()
                self._bell.ring()
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

    def _head(self) -> Iterator[Table]:
        yield sentence(self._title, DIM)
        if self._failing_since is not None:
            words = _("Unavailable for %(seconds).0f s, tried again: %(reason)s")
            yield sentence(words % {"seconds": monotonic() - self._failing_since, "reason": self._problem}, RED)


@contextmanager
def _keyboard() -> Iterator[Any]:
    """The keyboard if it can be read key by key; its modes are restored at the end."""
    if sys.platform == "win32" or sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
        yield None
        return
    import termios  # noqa: PLC0415 - Windows has neither, and its standard input cannot be polled
    import tty  # noqa: PLC0415

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin, termios.TCSANOW)
    try:
        yield sys.stdin
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _is_end(keys: Any) -> bool:
    """Was q pressed, or the terminal closed?"""
    try:
        pressed = os.read(keys.fileno(), 64)
    except OSError:
        return True
    return not pressed or b"q" in pressed.lower()

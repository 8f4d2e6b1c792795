"""A text that is drawn again and again in a terminal, like `top`: `outbox_status --watch`.

It uses the terminal's alternate screen, so the previous contents of the screen return at the end. It is drawn again when the
window is resized. The text is read on a thread of its own: "q" and Ctrl-C end the view also while a database does not answer. A
failed reading leaves the last text on the screen, below a line that says why. Without a terminal the texts follow each other.

Plain escape sequences of ECMA-48 and xterm; no library.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from django.db import connections
from django.utils.translation import gettext as _

from exactly_once.process.clock import monotonic
from exactly_once.process.loop import Bell, StopRequest
from exactly_once.process.running import is_private
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.wire.text import describe, visible

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _TO_THE_END_OF_LINE, _TO_THE_END = "\x1b[H", "\x1b[K", "\x1b[J"
_RED, _YELLOW, _DIM, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Rates:
    """How fast counts change from one drawing to the next. The first drawing has no rate."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}

    def of(self, name: str, count: float) -> str:
        """ "+12.5/s", "-3.0/s", or "" if it is unknown or nothing changed."""
        now = monotonic()
        before, self._before[name] = self._before.get(name), (now, count)
        if before is None or now <= before[0] or count == before[1]:
            return ""
        return f"{(count - before[1]) / (now - before[0]):+,.1f}/s"


class LiveView:
    """Draws `read()` every `every_seconds` until it is asked to stop.

    Args:
        title: the first line; the last time of reading is added.
        alarming, remarkable: patterns of lines that are shown in red and in yellow.
    """

    def __init__(
        self,
        read: Callable[[], str],
        *,
        title: str,
        every_seconds: float,
        alarming: Sequence[str] = (),
        remarkable: Sequence[str] = (),
        out: TextIO | None = None,
    ) -> None:
        self._read = read
        self._title = title
        self._every_seconds = every_seconds
        tones = ((alarming, _RED), (remarkable, _YELLOW))
        self._colours = [(re.compile("|".join(patterns)), colour) for patterns, colour in tones if patterns]
        self._out = out or sys.stdout
        self._bell = Bell()
        self._text = ""
        self._failing_since: float | None = None
        self._problem = ""
        self.is_on_a_terminal = self._out.isatty()
        self._has_colours = self.is_on_a_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def run(self, stop: StopRequest) -> None:
        """Draw until asked to stop, by `stop` or by the key q."""
        if any(map(is_private, connections.all(initialized_only=True))):
            self._run_alone(stop)
            return
        reader = threading.Thread(target=self._keep_reading, args=[stop], name="reader", daemon=True)
        with self._screen() as keyboard:
            keys = keyboard
            reader.start()
            while not stop:
                # The clock in the first line goes on also while a reading takes long.
                rung = self._bell.wait(self._every_seconds, stop, also=keys)
                if keys is not None and (pressed := _pressed(keys)) is not None:
                    if not pressed:
                        keys = None  # the terminal was closed
                    elif b"q" in pressed.lower():
                        stop.set()
                if not stop and (rung or self.is_on_a_terminal):
                    self._draw()

    def _run_alone(self, stop: StopRequest) -> None:
        """Read and draw on this thread, which is the only one that sees the data, as in a test."""
        with self._screen():
            while not stop:
                self._read_once()
                self._draw()
                stop.wait(self._every_seconds)

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
            self._text = visible(self._read())
            self._failing_since = None
        except Exception as error:  # noqa: BLE001 - whatever it is, it may be over at the next reading
            self._failing_since = self._failing_since or monotonic()
            self._problem = visible(describe(error))
            for connection in connections.all(initialized_only=True):
                if not is_private(connection):
                    connection.close()

    def _draw(self) -> None:
        lines = [*self._head(), *self._text.splitlines()]
        if not self.is_on_a_terminal:
            self._out.write("\n".join([*lines, "", ""]))
            self._out.flush()
            return
        width, height = os.get_terminal_size(self._out.fileno())
        if len(lines) > height:
            left = len(lines) - height + 1
            lines = [*lines[: height - 1], _("(%(count)d more lines: enlarge the window)") % {"count": left}]
        shown = "\r\n".join(self._coloured(_fitting(line, width)) + _TO_THE_END_OF_LINE for line in lines)
        self._out.write(_HOME + shown + _TO_THE_END)
        self._out.flush()

    def _head(self) -> Iterator[str]:
        yield self._title
        if self._failing_since is not None:
            yield _("Unavailable for %(seconds).0f s, tried again: %(reason)s") % {
                "seconds": monotonic() - self._failing_since,
                "reason": self._problem,
            }
        yield ""

    def _coloured(self, line: str) -> str:
        if not self._has_colours:
            return line
        if line == self._title:
            return f"{_DIM}{line}{_PLAIN}"
        if self._failing_since is not None and line.endswith(self._problem[:20]):
            return f"{_RED}{line}{_PLAIN}"
        for pattern, colour in self._colours:
            if pattern.search(line):
                return f"{colour}{line}{_PLAIN}"
        return line

    @contextmanager
    def _screen(self) -> Iterator[Any]:
        """The alternate screen, and the keyboard if it can be read key by key. Everything is restored at the end."""
        if not self.is_on_a_terminal:
            yield None
            return
        keys = sys.stdin if sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty() else None
        before = termios.tcgetattr(keys) if keys is not None else None
        is_main = threading.current_thread() is threading.main_thread()
        resized = signal.signal(signal.SIGWINCH, lambda *_args: self._bell.ring()) if is_main else None
        self._out.write(_ENTER)
        try:
            if keys is not None:
                tty.setcbreak(keys, termios.TCSANOW)
            yield keys
        finally:
            if keys is not None and before is not None:
                termios.tcsetattr(keys, termios.TCSANOW, before)
            if is_main:
                signal.signal(signal.SIGWINCH, resized)
            with suppress(OSError):
                self._out.write(_LEAVE)
                self._out.flush()


def _fitting(line: str, width: int) -> str:
    line = _UNPRINTABLE.sub(" ", line)
    return line if len(line) <= width else f"{line[: max(width - 1, 0)]}…"


def _pressed(keys: Any) -> bytes | None:
    """The keys that were pressed, b"" at the end of the input; None if none was."""
    poll = select.poll()
    poll.register(keys, select.POLLIN)
    if not poll.poll(0):
        return None
    try:
        return os.read(keys.fileno(), 64)
    except OSError:
        return b""

"""Terminal output of commands."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, TextIO

from django.core.management.base import CommandError
from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_naive, make_aware
from django.utils.translation import gettext as _

from exactly_once.process.clock import monotonic, utcnow

_PRECISE_SECONDS = 10
_MOST_DAYS = 36_500
_SHORTEST_MEASURED_SECONDS = 0.5
_CONTINUED = "  "
_LEVELS = {0: logging.ERROR, 1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG}


def log_to_console(package: str, verbosity: int) -> None:
    """Log `package`, and what it stands on, to the console, unless the project's LOGGING already has a handler for it."""
    for name in (package, "exactly_once"):
        logger = logging.getLogger(name)
        if logger.hasHandlers():
            continue
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(_LEVELS[verbosity])


def message_id(given: str) -> uuid.UUID:
    """Parse a message id.

    Raises:
        CommandError: it is not a message id.
    """
    try:
        return uuid.UUID(given)
    except ValueError as error:
        words = _("%(given)s is not a message id: it must be a UUID, as %(example)s.")
        raise CommandError(words % {"given": repr(given), "example": uuid.UUID(int=0)}) from error


def refuse_unknown(given: Iterable[str], found: Iterable[object], states: Iterable[str]) -> None:
    """Fail the command, after the found messages are processed, if a named message was not found.

    Raises:
        CommandError: some of the `given` are not among those `found` in one of `states`.
    """
    known = {str(one) for one in found}
    if missing := [one for one in given if one not in known]:
        words = _("Not here, or not %(states)s: %(messages)s.")
        raise CommandError(words % {"states": _(" or ").join(states), "messages": ", ".join(missing)})


def table(rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns: the first to the left, the others to the right. A row may be shorter than others."""
    lines = [[str(cell) for cell in row] for row in rows]
    most = max(map(len, lines))
    lines = [line + [""] * (most - len(line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def fitted(text: str, stream: Any) -> str:
    """`text` for `stream`: on a terminal, lines that are longer than it is wide are broken between words.

    Args:
        stream: with `isatty()`; text for a file or a pipe is not changed.
    """
    if not stream.isatty():
        return text
    wrapper = textwrap.TextWrapper(
        width=shutil.get_terminal_size().columns,
        subsequent_indent=_CONTINUED,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join("\n".join(wrapper.wrap(line)) for line in text.split("\n"))


def days(option: str, given: float) -> timedelta:
    """The duration that a command's `option` asks for.

    Raises:
        CommandError: it is negative, not a number, or beyond a century.
    """
    if not 0 <= given <= _MOST_DAYS:
        words = _("%(option)s is %(given)s: it must be a number of days from 0 to %(most)s.")
        raise CommandError(words % {"option": option, "given": given, "most": _MOST_DAYS})
    return timedelta(days=given)


def instant(option: str, given: str | None) -> datetime | None:
    """The instant that a command's `option` asks for, in the project's time zone unless it names another; None without one.

    Raises:
        CommandError: it is not an instant.
    """
    if given is None:
        return None
    try:
        parsed = parse_datetime(given)
    except ValueError:
        parsed = None
    if parsed is None:
        words = _("%(option)s is %(given)s: it must be an instant, 2026-03-01T10:00 or 2026-03-01T10:00:00+01:00.")
        raise CommandError(words % {"option": option, "given": repr(given)})
    return make_aware(parsed) if is_naive(parsed) else parsed


def age(instant: datetime | None, now: datetime | None = None) -> str:
    """The time since `instant` as text, by this host's clock or until `now`; "-" without an instant."""
    if instant is None:
        return "-"
    seconds = max(((now or utcnow()) - instant).total_seconds(), 0)
    if seconds < _PRECISE_SECONDS:
        return f"{seconds:.1f} s"
    return str(timedelta(seconds=int(seconds)))


class Progress:
    """A progress bar on one line, on a terminal only: "deleted 1,200 of 5,000, 400/s, 10 s left"."""

    def __init__(self, verb: str, total: int, stream: TextIO | None = None) -> None:
        self._verb = verb
        self._total = total
        self._stream = stream or sys.stderr
        self._began_at = monotonic()
        self.done = 0

    def advance(self, count: int) -> None:
        self.done += count
        if self._stream.isatty():
            share = self.done / self._total if self._total else 1.0
            bar = "█" * int(24 * min(share, 1)) + "·" * (24 - int(24 * min(share, 1)))
            done = _("%(verb)s %(done)s of %(total)s") % {
                "verb": self._verb,
                "done": f"{self.done:,}",
                "total": f"{self._total:,}",
            }
            # The line before may have been longer.
            self._stream.write(f"\r{bar} {done}{self._speed()}\x1b[K")
            self._stream.flush()

    def _speed(self) -> str:
        seconds = monotonic() - self._began_at
        if not self.done or seconds < _SHORTEST_MEASURED_SECONDS:
            return ""
        rate = self.done / seconds
        left = timedelta(seconds=round(max(self._total - self.done, 0) / rate))
        return _(", %(rate)s/s, %(time)s left") % {"rate": f"{rate:,.0f}", "time": left}

    def finish(self) -> None:
        if self._stream.isatty():
            self._stream.write("\n")

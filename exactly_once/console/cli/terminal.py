"""What commands read and print: tables, sentences, and how much is done.

On a terminal `rich` colours lines, breaks long ones between words and draws bars, if it is installed (the extra `terminal`).
Without it, and into a pipe or a file, they are plain lines with the same words. Texts of messages are escaped everywhere: none
can move the cursor or change a colour.
"""

import os
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from typing import Any, NamedTuple, Self

from django.core.management.base import CommandError
from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_naive, make_aware
from django.utils.translation import gettext as _

from exactly_once.process.clock import monotonic, utcnow
from exactly_once.wire.durations import parse_duration
from exactly_once.wire.identity import uuid_in
from exactly_once.wire.text import visible

STANDARD = "-"
"""The name of the standard input or output."""
RED, YELLOW, BOLD, DIM = "red", "yellow", "bold", "dim"

_PRECISE_SECONDS = 10
_BETWEEN_LINES_SECONDS = 2.0


class Line(NamedTuple):
    """The cells of a line, and its style on a terminal."""

    cells: Sequence[str]
    style: str = ""


@dataclass(frozen=True)
class Table:
    """Lines with aligned columns. A line may be shorter than others.

    Attributes:
        texts: the number of columns at the end that are text. These and the first one are aligned to the left, the others to
            the right. The last text may be long.
    """

    lines: Sequence[Line]
    texts: int = 0

    def aligned(self) -> Iterator[tuple[str, str]]:
        """Each line as text, with its style."""
        widths = [max(map(len, column)) for column in zip_longest(*(line.cells for line in self.lines), fillvalue="")]
        if self.texts:
            widths[-1] = 0
        numbers = range(1, len(widths) - self.texts)
        for line in self.lines:
            padded = (
                cell.rjust(width) if number in numbers else cell.ljust(width)
                for number, (cell, width) in enumerate(zip(line.cells, widths, strict=False))
            )
            yield "  ".join(padded).rstrip(), line.style


def sentence(text: str, style: str = "") -> Table:
    return Table([Line([text], style)], texts=1)


def plain(tables: Iterable[Table]) -> str:
    """With an empty line between two tables."""
    return "\n\n".join("\n".join(text for text, _style in table.aligned()) for table in tables)


def coloured(tables: Iterable[Table]) -> Any:
    """The same, for `rich`."""
    from rich.text import Text  # noqa: PLC0415 - as in console_on()

    blank = Text("\n\n")
    return blank.join(Text("\n").join(Text(visible(text), style) for text, style in table.aligned()) for table in tables)


def show(tables: Sequence[Table], out: Any) -> None:
    """Print tables. `out` is a command's `stdout`, which would escape colours."""
    if console := console_on(getattr(out, "_out", out)):
        console.print(coloured(tables))
    else:
        out.write(plain(tables))


def console_on(stream: Any) -> Any:
    """A console of `rich` on this stream; None: it gets plain lines."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console  # noqa: PLC0415 - rich is an extra, and a process without a terminal does not load it
    except ImportError:
        return None
    return Console(file=stream, highlight=False)


@contextmanager
def opened(name: str, mode: str, standard: Any) -> Iterator[Any]:
    """The file with this name, for `with`; `standard` for "-". Only its owner may read a file that is written.

    Raises:
        CommandError: it cannot be opened.
    """
    if name == STANDARD:
        yield standard
        return
    try:
        file = open(name, mode, encoding=None if "b" in mode else "utf-8", opener=_for_its_owner)  # noqa: SIM115 - closed below
    except OSError as error:
        words = _("%(file)s cannot be opened: %(why)s.")
        raise CommandError(words % {"file": name, "why": error.strerror}) from error
    with file:
        yield file


def _for_its_owner(name: str, flags: int) -> int:
    descriptor = os.open(name, flags, 0o600)
    if flags & os.O_CREAT:
        os.fchmod(descriptor, 0o600)  # an existing file keeps its mode otherwise
    return descriptor


def message_id(given: str) -> uuid.UUID:
    """Parse a message id.

    Raises:
        CommandError: it is not a message id.
    """
    if found := uuid_in(given):
        return found
    words = _("%(given)s is not a message id: it must be a UUID, as %(example)s.")
    raise CommandError(words % {"given": repr(given), "example": uuid.UUID(int=0)})


def refuse_unknown(given: Iterable[str], found: Iterable[object], states: Iterable[str]) -> None:
    """Fail the command, after the found messages are processed, if a named message was not found.

    Raises:
        CommandError: some of the `given` are not among those `found` in one of `states`.
    """
    known = {str(one) for one in found}
    if missing := [one for one in given if one not in known]:
        words = _("Not here, or not %(states)s: %(messages)s.")
        raise CommandError(words % {"states": _(" or ").join(states), "messages": ", ".join(missing)})


def duration(option: str, given: str | timedelta) -> timedelta:
    """The duration that a command's `option` asks for.

    Raises:
        CommandError: it is not a duration.
    """
    try:
        return parse_duration(option, given)
    except (TypeError, ValueError) as error:
        words = _("%(option)s is %(given)s: it must be a number and s, m, h or d, as in 30d.")
        raise CommandError(words % {"option": option, "given": given}) from error


def instant(option: str, given: str | None) -> datetime | None:
    """The instant that a command's `option` asks for, in the project's time zone unless it names another; None without one.

    Raises:
        CommandError: it is not an instant.
    """
    if given is None:
        return None
    try:
        parsed = parse_datetime(given)
        if parsed is not None:
            parsed = make_aware(parsed) if is_naive(parsed) else parsed
            parsed.astimezone(UTC)
    except (ValueError, OverflowError):  # in UTC it is before the year 1 or after 9999
        parsed = None
    if parsed is None:
        words = _("%(option)s is %(given)s: it must be an instant, 2026-03-01T10:00 or 2026-03-01T10:00:00+01:00.")
        raise CommandError(words % {"option": option, "given": repr(given)})
    return parsed


def age(instant: datetime | None, now: datetime | None = None) -> str:
    """The time since `instant` as text, by this host's clock or until `now`; "-" without an instant."""
    if instant is None:
        return "-"
    seconds = max(((now or utcnow()) - instant).total_seconds(), 0)
    if seconds < _PRECISE_SECONDS:
        return f"{seconds:.1f} s"
    return str(timedelta(seconds=int(seconds)))


class Progress(ExitStack):
    """How much is done, for `with`: on a terminal a bar with the time left, or without `rich` a line every two seconds."""

    def __init__(self, verb: str, total: int, stream: Any = None) -> None:
        super().__init__()
        self._verb, self._total, self._stream = verb, total, stream or sys.stderr
        self._reported_at = monotonic()
        self._bar: Any = None
        self.done = 0

    def __enter__(self) -> Self:
        if console := console_on(self._stream):
            from rich import progress  # noqa: PLC0415 - as in console_on()

            columns = progress.Progress.get_default_columns()
            self._bar = self.enter_context(progress.Progress(*columns, progress.MofNCompleteColumn(), console=console))
            self._task = self._bar.add_task(self._verb, total=self._total)
        return self

    def advance(self, count: int) -> None:
        self.done += count
        if self._bar:
            self._bar.update(self._task, completed=self.done)
        elif self._stream.isatty() and monotonic() - self._reported_at >= _BETWEEN_LINES_SECONDS:
            self._reported_at = monotonic()
            counts = {"verb": self._verb, "done": f"{self.done:,}", "total": f"{self._total:,}"}
            self._stream.write(_("%(verb)s %(done)s of %(total)s") % counts + "\n")

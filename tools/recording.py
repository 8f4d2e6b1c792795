"""Record the demo as an SVG that shows one picture after the other, like a terminal: docs/images/demo.svg.

It runs the demo itself, on a console that keeps each picture it has drawn. A viewer that prefers no motion sees the last one.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI as THEME

from tests.support import ROOT

FILE = ROOT / "docs" / "images" / "demo.svg"
LARGEST_BYTES = 150_000
COLUMNS, ROWS = 80, 43
_CHARACTER, _LINE, _FONT, _MARGIN = 8.43, 17, 14, 16
_PICTURES = 14
_SECONDS, _LAST_SECONDS = 0.8, 8.0
"""How long each picture is shown, and the last one."""
_ORDERS, _KILLS = 60, 4

Picture = list[list[Segment]]


class Recorder(Console):
    """A terminal that records what it shows, as often as a `Live` redraws it.

    Attributes:
        pictures: each with the seconds since the beginning.
    """

    def __init__(self) -> None:
        terminal = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        super().__init__(file=StringIO(), width=COLUMNS, height=ROWS, force_terminal=True, _environ=terminal)
        self.pictures: list[tuple[float, Picture]] = []
        self._began_at = time.monotonic()
        self._above: Picture = []
        self._live: Live | None = None

    def push_render_hook(self, hook: Any) -> None:
        super().push_render_hook(hook)
        self._live = hook

    def pop_render_hook(self) -> None:
        super().pop_render_hook()
        if self._live is not None:
            self._above += self._lines_of([self._live.renderable])
            self._live = None

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        if self._live is None:
            self._above += self._lines_of(objects)
            self.record_picture([])
        else:
            self.record_picture([self._live.renderable])

    def record_picture(self, below: Iterable[Any]) -> None:
        picture = [*self._above, *self._lines_of(below)][-ROWS:]
        self.pictures.append((time.monotonic() - self._began_at, picture))

    def _lines_of(self, objects: Iterable[Any]) -> Picture:
        lines = []
        for each in objects:
            rendered = self.render_str(each, highlight=False) if isinstance(each, str) else each
            lines += self.render_lines(rendered, pad=False)
        return lines


def drawn(pictures: Sequence[Picture], title: str) -> str:
    """The SVG. Each picture is a group that is visible for its part of the time."""
    width, height = COLUMNS * _CHARACTER + 2 * _MARGIN, (ROWS + 2) * _LINE + 2 * _MARGIN
    total = _SECONDS * (len(pictures) - 1) + _LAST_SECONDS
    colours = _Colours()
    groups = []
    for number, picture in enumerate(pictures):
        begin = 100 * _SECONDS * number / total
        end = 100 if number == len(pictures) - 1 else 100 * _SECONDS * (number + 1) / total
        hidden = "" if begin == 0 else "0%{visibility:hidden}"
        after = "" if end == 100 else f"{end:.3f}%{{visibility:hidden}}"
        frames = f"@keyframes p{number}{{{hidden}{begin:.3f}%{{visibility:visible}}{after}}}"
        rule = f".p{number}{{animation:p{number} {total:.1f}s step-end infinite}}"
        lines = "".join(_line(row, line, colours) for row, line in enumerate(picture))
        groups.append((f"{frames}{rule}", f'<g class="p p{number}">{lines}</g>'))
    still = f"@media(prefers-reduced-motion:reduce){{.p{{animation:none}}.p{len(pictures) - 1}{{visibility:visible}}}}"
    style = f".p{{visibility:hidden}}{''.join(rule for rule, _ in groups)}{still}{colours.rules()}"
    font = "Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-family="{font}" font-size="{_FONT}">'
        f"<title>{escape(title)}</title><style>{style}text{{white-space:pre}}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="{THEME.background_color.hex}"/>'
        f'<text class="d" x="{_MARGIN}" y="{_MARGIN + _FONT}">$ {escape(title)}</text>'
        f"{''.join(group for _, group in groups)}</svg>\n"
    )


class _Colours:
    """The styles of the text as classes of CSS."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def of(self, style: Style | None) -> str:
        """The class; "" for plain text."""
        if style is None:
            return ""
        rule = ""
        if style.color is not None and not style.color.is_default:
            rule += f"fill:{style.color.get_truecolor(THEME).hex};"
        if style.dim:
            rule += "opacity:.6;"
        if style.bold:
            rule += "font-weight:bold;"
        if style.italic:
            rule += "font-style:italic;"
        return self._names.setdefault(rule, f"c{len(self._names)}") if rule else ""

    def rules(self) -> str:
        plain = f"text{{fill:{THEME.foreground_color.hex}}}.d{{opacity:.6}}"
        return plain + "".join(f".{name}{{{rule}}}" for rule, name in self._names.items())


def _line(row: int, segments: Sequence[Segment], colours: _Colours) -> str:
    text = "".join(segment.text for segment in segments if not segment.control).rstrip()
    if not text:
        return ""
    left, spans = len(text), []
    for segment in segments:
        part = "" if segment.control else segment.text[:left]
        left -= len(part)
        if part:
            name = colours.of(segment.style)
            spans.append(f'<tspan class="{name}">{escape(part)}</tspan>' if name else escape(part))
    y = _MARGIN + _FONT + (row + 2) * _LINE
    return f'<text x="{_MARGIN}" y="{y}" textLength="{len(text) * _CHARACTER:.0f}" xml:space="preserve">{"".join(spans)}</text>'


def chosen(pictures: Sequence[tuple[float, Picture]]) -> list[Picture]:
    """Some, at equal intervals, and the last."""
    last_at = pictures[-1][0]
    wanted = [last_at * number / (_PICTURES - 1) for number in range(_PICTURES - 1)]
    found = [next(index for index, (at, _) in enumerate(pictures) if at >= instant) for instant in wanted]
    return [pictures[index][1] for index in [*dict.fromkeys(found), len(pictures) - 1]]


def record() -> list[tuple[float, Picture]]:
    """Run the demo on SQLite files of its own."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ.update(
            DJANGO_SETTINGS_MODULE="demo_shop.settings",
            DATABASE_URL=f"sqlite:///{directory}/shop.sqlite3",
            SAVINGS_DATABASE_URL=f"sqlite:///{directory}/savings.sqlite3",
            BROKER_URL="local://",
        )
        import django  # noqa: PLC0415 - the settings are chosen first

        django.setup()
        from django.core.management import call_command  # noqa: PLC0415

        from demo_shop.simulation.management.commands import demo  # noqa: PLC0415

        call_command("migrate", verbosity=0)
        call_command("migrate", verbosity=0, database="savings")
        recorder = Recorder()
        with patch.object(demo, "Console", return_value=recorder):
            call_command("demo", orders=_ORDERS, kills=_KILLS, seed=1)
        return recorder.pictures


def write(file: Path, text: str) -> None:
    size = len(text.encode())
    if size > LARGEST_BYTES:
        raise SystemExit(f"{file} would have {size:,} bytes; the limit is {LARGEST_BYTES:,}. Record fewer pictures.")
    file.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{file.relative_to(ROOT)}: {size:,} bytes\n")


def main() -> None:
    write(FILE, drawn(chosen(record()), "make demo"))


if __name__ == "__main__":
    main()

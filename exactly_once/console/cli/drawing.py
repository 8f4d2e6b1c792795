"""What commands draw on a terminal, with `rich`. Texts of messages are escaped: none can move the cursor or change a colour."""

from collections.abc import Callable, Sequence
from typing import Any

from django.utils.translation import gettext as _
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from exactly_once.console.cli.terminal import Table
from exactly_once.wire.text import visible


def show(tables: Sequence[Table], stream: Any) -> None:
    _console(stream).print(_page(tables))


def _console(stream: Any) -> Console:
    return Console(file=stream, highlight=False)


class Bar:
    """A bar on one line: what is done, of how many, and the time left."""

    def __init__(self, verb: str, total: int, stream: Any) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=_console(stream))
        self._task = self._progress.add_task(verb, total=total)
        self.start, self.stop = self._progress.start, self._progress.stop

    def set(self, done: int) -> None:
        self._progress.update(self._task, completed=done)


def screen(stream: Any, tables: Callable[[], Sequence[Table]]) -> Live:
    """The alternate screen of a terminal, drawn again every second, for `with`: its previous contents return at the end."""
    return Live(
        console=_console(stream),
        screen=True,
        refresh_per_second=1,
        redirect_stdout=False,
        redirect_stderr=False,
        get_renderable=lambda: _Cropped(_page(tables())),
    )


class _Cropped:
    """The lines that fit a screen; the others are counted in the last one."""

    def __init__(self, page: Group) -> None:
        self._page = page

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines, height = console.render_lines(self._page, options, pad=False), options.max_height
        if len(lines) > height:
            words = _("(%(count)d more lines: enlarge the window)") % {"count": len(lines) - height + 1}
            lines = [*lines[: height - 1], [Segment(words[: options.max_width])]]
        for line in lines:
            yield from line
            yield Segment.line()


def _page(tables: Sequence[Table]) -> Group:
    return Group(*[part for table in tables for part in ("", _grid(table))][1:])


def _grid(table: Table) -> Grid:
    columns = max(number + 1 for line in table.lines for number, cell in enumerate(line.cells) if cell or not number)
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for number in range(columns):
        grid.add_column(justify="right" if table.is_number(number, columns) else "left", overflow="fold")
    for line in table.lines:
        grid.add_row(*(Text(visible(cell)) for cell in line.cells[:columns]), style=line.style)
    return grid

"""Tables and progress of commands: drawn on a terminal with `rich`, and plain lines without it or into a pipe."""

import os
import re
import sys
from contextlib import suppress
from io import StringIO

import pytest
from django.core.management.base import CommandError

from exactly_once.console.cli import terminal
from exactly_once.console.cli.command import TranslatedCommand
from exactly_once.console.cli.terminal import BOLD, RED, Line, Progress, Table, instant, sentence, show

SENTENCE = f"No consumer is running for: {', '.join(f'orders.handler_{number}' for number in range(9))}."
COUNTS = Table([Line(["outbox", "default"], BOLD), Line(["ready", "1,200", "+2.0/s"]), Line(["dead", "3"], RED)])
PLAIN = "outbox  default\nready     1,200  +2.0/s\ndead          3"
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
FOREIGN = "\x1b[2Jcleared [red]and[/red] \u202ereversed"


class Terminal(StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def without_rich(monkeypatch):
    """As in an environment where `import rich` fails."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)


def shown(*tables, on):
    """What a command prints on a stream."""
    show(tables, TranslatedCommand(stdout=on).stdout)
    return on.getvalue()


def test_terminal_shows_the_plain_lines_in_colours_unless_the_user_wants_none(monkeypatch):
    drawn = shown(COUNTS, sentence("No relay is running.", RED), on=Terminal())
    monkeypatch.setenv("NO_COLOR", "1")

    assert "\x1b[31mdead" in drawn
    assert "\x1b[1moutbox" in drawn
    assert ESCAPE.sub("", drawn) == f"{PLAIN}\n\nNo relay is running.\n"
    assert "\x1b[31m" not in shown(COUNTS, on=Terminal())


def test_pipe_has_plain_lines_of_any_length():
    assert shown(COUNTS, sentence(SENTENCE), on=StringIO()) == f"{PLAIN}\n\n{SENTENCE}\n"


@pytest.mark.usefixtures("without_rich")
def test_terminal_without_rich_has_plain_lines():
    assert shown(COUNTS, sentence(SENTENCE), on=Terminal()) == f"{PLAIN}\n\n{SENTENCE}\n"


def test_sentence_longer_than_the_terminal_is_broken_between_words():
    lines = shown(sentence(SENTENCE), on=Terminal()).splitlines()

    assert max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines) == SENTENCE


@pytest.mark.parametrize("stream", [Terminal, StringIO])
def test_foreign_text_cannot_move_the_cursor_nor_change_a_colour(stream):
    drawn = shown(Table([Line(["topic", FOREIGN])], texts=1), on=stream())

    assert "\x1b[2J" not in drawn
    assert "\u202e" not in drawn
    assert r"\u001b[2Jcleared [red]and[/red] \u202ereversed" in " ".join(drawn.split())


def test_progress_is_a_bar_on_a_terminal_and_the_cursor_returns_when_the_work_fails():
    screen = Terminal()
    with suppress(ValueError), Progress("deleted", 2_000, screen) as progress:
        progress.advance(1_000)
        raise ValueError

    assert "deleted" in screen.getvalue()
    assert "1000/2000" in screen.getvalue()
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")


@pytest.mark.usefixtures("without_rich")
def test_progress_without_rich_is_a_line_every_two_seconds(monkeypatch):
    now = 100.0
    monkeypatch.setattr(terminal, "monotonic", lambda: now)
    screen = Terminal()
    with Progress("deleted", 5_000, screen) as progress:
        for seconds in (1.0, 1.5, 1.0):
            now += seconds
            progress.advance(1_000)

    assert screen.getvalue() == "deleted 2,000 of 5,000\n"


def test_progress_is_not_shown_in_a_pipe():
    pipe = StringIO()
    with Progress("deleted", 0, pipe) as progress:
        progress.advance(1)

    assert pipe.getvalue() == ""
    assert progress.done == 1


@pytest.mark.parametrize("given", ["0001-01-01T00:00+14:00", "9999-12-31T23:59-12:00", "2026-02-30", "now", ""])
def test_instant_that_no_database_has_is_refused_with_an_example(given):
    with pytest.raises(CommandError, match=r"--since is '.*': it must be an instant, 2026-03-01T10:00 or"):
        instant("--since", given)
    assert instant("--since", "2026-03-01T10:00+01:00").isoformat() == "2026-03-01T10:00:00+01:00"


def test_no_color_on_the_command_line_switches_colours_off(monkeypatch):
    """Django has this option for every command."""

    class Command(TranslatedCommand):
        def handle(self, *args, **options):
            show([COUNTS], self.stdout)

    def drawn(*options):
        monkeypatch.setattr(sys, "stdout", Terminal())
        Command().run_from_argv(["manage.py", "some_command", *options])
        return sys.stdout.getvalue()

    assert "\x1b[31m" in drawn("--force-color")
    monkeypatch.setenv("NO_COLOR", "")
    assert "\x1b[31m" not in drawn("--no-color")


def test_argument_that_is_not_utf8_is_an_error_in_words(capsys):
    """The interpreter hands its bytes over as surrogates, which no database takes."""

    class Command(TranslatedCommand):
        def handle(self, *args, **options):
            os.fsdecode(b"gr\xfcn").encode()

    with pytest.raises(SystemExit):
        Command().run_from_argv(["manage.py", "some_command"])
    assert "is not UTF-8" in capsys.readouterr().err

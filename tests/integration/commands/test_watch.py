"""`exactly_once_status --watch` as a person sees it, in a pseudo-terminal."""

import fcntl
import os
import pty
import re
import signal
import struct
import termios
import threading

import pytest
from django.db import connections

from outbox.states import State
from tests.support.processes import start_python
from tests.support.relaying import published, set_columns
from tests.support.servers import FaultProxy
from tests.support.waiting import A_WHILE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

WATCH = ["-m", "django", "exactly_once_status", "--watch"]
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command in a pseudo-terminal of 100 columns, for `with`."""

    def __init__(self, environment, *, columns=100, lines=40):
        self._ours, self._theirs = pty.openpty()
        self.resize(columns, lines)
        self.modes = termios.tcgetattr(self._theirs)
        self._said = b""
        given = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        self.process = start_python(WATCH, environment={**given, "TERM": "xterm"}, stdin=self._theirs, output=self._theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        self._reader.join(A_WHILE)
        os.close(self._ours)

    def _read(self):
        while True:
            try:
                read = os.read(self._ours, 65_536)
            except OSError:
                return
            if not read:
                return
            self._said += read

    @property
    def said(self):
        return self._said.decode(errors="replace")

    @property
    def screen(self):
        """The lines of the last complete drawing."""
        *_, last, _rest = ["", "", *self.said.split("\x1b[H")]
        return [ESCAPE.sub("", line).rstrip() for line in last.split("\r\n")]

    def resize(self, columns, lines):
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until_drawn(self, text):
        wait_until(lambda: any(text in line for line in self.screen), within=A_WHILE)


@pytest.fixture
def terminal(process_environment):
    return lambda **changes: Terminal({**process_environment, **changes.pop("environment", {})}, **changes)


@pytest.fixture
def database(process_environment):
    """A network to the database of the view that can fail."""
    settings = connections["default"].settings_dict
    with FaultProxy(settings["HOST"], int(settings["PORT"])) as database:
        process_environment["DATABASE_URL"] = database.through(process_environment["DATABASE_URL"])
        yield database


@pytest.mark.every_database
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_view_with_the_terminal_as_it_was(terminal, number):
    with terminal() as view:
        view.until_drawn("oldest waiting")
        view.process.send_signal(number)
        assert view.process.wait(A_WHILE) == 0
        wait_until(lambda: LEAVE in view.said)

        assert view.said.index(ENTER) < view.said.index("oldest waiting") < view.said.index(LEAVE)
        assert "Traceback" not in view.said
        assert termios.tcgetattr(view._theirs) == view.modes


def test_view_shows_rates_and_colours_what_needs_attention(terminal):
    set_columns(published("t"), state=State.DEAD)
    with terminal() as view:
        view.until_drawn("dead")
        for _ in range(3):
            published("t")
        wait_until(lambda: any(re.match(r"ready +3 +\+\d+\.\d/s", line) for line in view.screen), within=A_WHILE)

        assert re.search(r"\x1b\[31mdead\b", view.said)


def test_view_fits_the_window_when_it_is_resized(terminal):
    with terminal(columns=100, lines=40) as view:
        view.until_drawn("oldest waiting")
        view.resize(20, 8)
        view.process.send_signal(signal.SIGWINCH)
        wait_until(lambda: len(view.screen) == 8, within=A_WHILE)

        assert max(map(len, view.screen)) <= 20


def test_view_survives_an_outage_of_the_database_and_says_so(database, terminal):
    with terminal() as view:
        view.until_drawn("oldest waiting")
        database.refuse()
        database.cut()
        view.until_drawn("Unavailable for")
        assert any("oldest waiting" in line for line in view.screen), "the last figures stay"
        database.accept()
        wait_until(lambda: not any("Unavailable for" in line for line in view.screen), within=A_WHILE)


def test_signal_ends_the_view_although_the_database_does_not_answer(database, terminal):
    with terminal() as view:
        view.until_drawn("oldest waiting")
        database.freeze()
        published("t")
        wait_until(lambda: view.said.count("\x1b[H") > 4, within=A_WHILE)
        view.process.send_signal(signal.SIGINT)

        assert view.process.wait(A_WHILE) == 0


def test_without_a_terminal_the_texts_follow_each_other_without_escape_sequences(process_environment, tmp_path):
    with (tmp_path / "out").open("wb") as out:
        process = start_python(WATCH, environment=process_environment, output=out.fileno())
        try:
            wait_until(lambda: (tmp_path / "out").read_text().count("oldest waiting") >= 2, within=A_WHILE)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(A_WHILE) == 0

    assert "\x1b" not in (tmp_path / "out").read_text()


def test_without_rich_the_texts_follow_each_other_on_a_terminal_until_a_signal(terminal, process_environment, tmp_path):
    (tmp_path / "rich.py").write_text("raise ImportError")
    path = f"{tmp_path}:{process_environment['PYTHONPATH']}"
    with terminal(environment={"PYTHONPATH": path}) as view:
        wait_until(lambda: view.said.count("oldest waiting") >= 4, within=A_WHILE)
        view.process.send_signal(signal.SIGINT)
        assert view.process.wait(A_WHILE) == 0

        assert "\x1b" not in view.said

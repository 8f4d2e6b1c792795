"""Output of commands on a terminal of 80 columns, and into a pipe."""

from io import StringIO

import pytest

from exactly_once.cli.terminal import fitted

SENTENCE = f"No consumer is running for: {', '.join(f'orders.handler_{number}' for number in range(9))}."


class Terminal(StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_line_longer_than_the_terminal_is_broken_between_words():
    table = "outbox   default\nready          1"

    lines = fitted(f"{table}\n\n{SENTENCE}", Terminal()).split("\n")

    assert lines[:3] == [*table.split("\n"), ""]
    assert max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines[3:]) == SENTENCE


def test_text_into_a_pipe_is_not_changed():
    assert fitted(SENTENCE, StringIO()) == SENTENCE

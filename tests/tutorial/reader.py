"""A reader who follows pages of the documentation word for word, in real shells.

What a reader does with a code block:

- Python with a path as its title: write that file, or append to it if the title says "(append)".
- Shell without a title: type it into the first terminal, and wait until it has ended; it must succeed.
- Shell with the title "terminal 2": type it there, and go on. At the end of the page it is stopped with Ctrl-C.
- Text with the title "output": the last block in the first terminal has printed these lines, in this order, perhaps among
  others. If other terminals are working, the block is repeated until it does.
- Text with the title "terminal 2": what runs there prints these lines.

In such lines `…` stands for anything, and a duration for another one. The reader's servers have other ports than the pages say,
so these are replaced in everything that the reader types and writes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.support.pages import Block, blocks_of
from tests.support.servers.private import watch

LONGEST_COMMAND_SECONDS = 300
"""An installation from the package index."""
LONGEST_WAIT_SECONDS = 60
_AGAIN_SECONDS = 0.5
_DURATION = r"\b\d+(?:\.\d+)? (?:ms|s|min)\b"
_END = "the block has ended with"


class Stumbled(AssertionError):
    """The page does not work as it is written."""


class Terminal:
    """A shell in a session of its own. What it prints is in `lines`."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_takes_ctrl_c,  # noqa: PLW1509 - it makes one system call
        )
        watch(self._process)
        self._changed = threading.Condition()
        self._has_ended = False
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def start(self, text: str) -> None:
        """Type it, and do not wait."""
        # A command must not read the next block as its input.
        assert self._process.stdin is not None
        self._process.stdin.write(f"failed=0; trap 'failed=$?' ERR\n{{ :\n{text}\n}} </dev/null\necho; echo '{_END}' $failed\n")
        self._process.stdin.flush()

    def run(self, text: str) -> list[str]:
        """Type it, wait for its end, and return what it has printed."""
        begin = len(self.lines)
        self.start(text)
        self.wait_until(lambda: any(line.startswith(_END) for line in self.lines[begin:]), LONGEST_COMMAND_SECONDS, text)
        printed = self.lines[begin:]
        end = next(number for number, line in enumerate(printed) if line.startswith(_END))
        if printed[end] != f"{_END} 0":
            raise Stumbled(f"A command has failed:\n{text}\n" + "\n".join(printed))
        # The empty line is ours, unless the output did not end with a line.
        return printed[: end - 1] if printed[end - 1] == "" else printed[:end]

    def wait_until(self, condition, seconds: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._has_ended, seconds)
            if not condition():
                raise Stumbled(
                    f"this was not printed within {seconds:.0f} s, or the shell has ended:\n{what}\n" + "\n".join(self.lines)
                )

    def interrupt(self) -> None:
        """Ctrl-C: whatever runs here must end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._signal(signal.SIGINT)
        try:
            self._process.wait(LONGEST_WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise Stumbled("Ctrl-C does not end it:\n" + "\n".join(self.lines)) from None
        self.kill()

    def kill(self) -> None:
        """End what is left, at once."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._reading.join(LONGEST_WAIT_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


class Reader:
    """Follows pages, one after the other, in one directory.

    Args:
        directory: where the reader begins; empty.
        environment: of every terminal.
        ports: the ports in the pages, and those that replace them.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str], ports: Mapping[int, int]) -> None:
        self.directory = directory
        self._environment = environment
        self._ports = {str(told): str(real) for told, real in ports.items()}
        self._first = Terminal(directory, environment)
        self._others: dict[str, Terminal] = {}
        self._typed = ""
        self._printed: list[str] = []

    def follow(self, page: Path, by_hand: Mapping[str, Callable[[], object]] | None = None, *, stop: bool = True) -> None:
        """Do what the page says.

        Args:
            by_hand: what the reader does in a browser, each just before the code block that contains its text.
            stop: with Ctrl-C in the other terminals, at the end of the page.
        """
        left = dict(by_hand or {})
        for block in blocks_of(page):
            for text in [text for text in left if text in block.code]:
                left.pop(text)()
            try:
                self._do(block)
            except Stumbled as stumbled:
                raise Stumbled(f"{page.name}, line {block.line}: {stumbled}") from None
        assert not left, left
        if stop:
            self.stop()

    def run(self, text: str) -> list[str]:
        """Type something that is not on the page into the first terminal."""
        return self._first.run(self._with_ports(text))

    def stop(self) -> None:
        """Ctrl-C in the other terminals."""
        for terminal in self._others.values():
            terminal.interrupt()
        self._others.clear()

    def leave(self) -> None:
        for terminal in (self._first, *self._others.values()):
            terminal.kill()

    def _do(self, block: Block) -> None:
        match block.language, block.title:
            case "python", _ if block.file:
                self._write(block)
            case "bash", "":
                self._typed = self._with_ports(block.code)
                self._printed = self._first.run(self._typed)
            case "bash", title:
                self._others[title] = Terminal(self.directory, self._environment)
                self._others[title].start(self._with_ports(block.code))
            case "text", "output":
                self._compare(block.code)
            case "text", title if title in self._others:
                terminal = self._others[title]
                terminal.wait_until(lambda: _shows(terminal.lines, block.code), LONGEST_WAIT_SECONDS, block.code)
            case _:
                raise Stumbled(f"what should a reader do with a block of {block.language} titled {block.title!r}?")

    def _write(self, block: Block) -> None:
        file = Path(self._first.run("pwd")[-1]) / block.file
        content = file.read_text(encoding="utf-8") if file.exists() else ""
        file.write_text(self._with_ports(block.applied_to(content)), encoding="utf-8")

    def _compare(self, shown: str) -> None:
        give_up_at = time.monotonic() + LONGEST_WAIT_SECONDS
        while not _shows(self._printed, shown):
            if not self._others or time.monotonic() > give_up_at:
                printed = "\n".join(self._printed)
                raise Stumbled(f"the page shows\n{shown}\nand the command\n{self._typed}\nprinted\n{printed}")
            time.sleep(_AGAIN_SECONDS)
            self._printed = self._first.run(self._typed)

    def _with_ports(self, text: str) -> str:
        return re.sub("|".join(self._ports), lambda found: self._ports[found[0]], text) if self._ports else text


def _takes_ctrl_c() -> None:
    """A shell that runs the tests in the background has made them ignore it, and a shell cannot undo that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _shows(printed: list[str], shown: str) -> bool:
    """Are the lines shown among those printed, in this order?"""
    lines = iter(printed)
    return all(any(re.fullmatch(pattern, line) for line in lines) for pattern in map(_pattern, shown.splitlines()) if pattern)


def _pattern(line: str) -> str:
    """A regular expression for a line that is shown, in which columns may have other widths."""
    between = r"\s+"
    words = [".*".join(map(re.escape, word.split("…"))) for word in re.sub(_DURATION, "…", line).split()]
    return rf"\s*{between.join(words)}\s*" if words else ""

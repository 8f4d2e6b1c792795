"""The code blocks of a page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
_APPEND = " (append)"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A code block.

    Attributes:
        title: of its fence, "" if it has none. That of a file is its path, with "(append)" if the text belongs at its end.
        line: where it begins.
    """

    language: str
    title: str
    text: str
    line: int

    @property
    def file(self) -> str:
        """The path of the file that it shows; "" if it shows none."""
        name = self.title.removesuffix(_APPEND)
        return name if self.language == "python" and name.endswith(".py") else ""

    def applied_to(self, content: str) -> str:
        """The content of its file after the reader has done what the page says."""
        return f"{content}\n{self.text}" if self.title.endswith(_APPEND) else self.text


def blocks(page: Path) -> Iterator[Block]:
    """The code blocks of a page, in order."""
    written = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(written):
        yield Block(
            language=found["language"],
            title=found["title"] or "",
            text=found["text"],
            line=written.count("\n", 0, found.start()) + 1,
        )


def titled_files(page: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The files that a reader of the page has at its end, by path.

    Args:
        given: the files before.
    """
    files = dict(given or {})
    for block in blocks(page):
        if block.file:
            files[block.file] = block.applied_to(files.get(block.file, ""))
    return files

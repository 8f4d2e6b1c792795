"""The code blocks of README and docs."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
_BLOCK = re.compile(r"^( *)```(\w+)(?: title=\"([^\"]*)\")?[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_MANAGE = re.compile(r"\bmanage\.py (\w+)((?:[ \t]+(?:\"[^\"]*\"|'[^']*'|[^\s\"'|;&<>#(){}]+)+)*)")
_APPEND = " (append)"
_LIST = re.compile(r"\[[^\[\]\n]*manage\.py[^\[\]\n]*\]")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A code block: its page, its first line there, what its first line says, and the code without the page's indentation."""

    page: Path
    line: int
    language: str
    title: str
    code: str

    @property
    def source(self) -> str:
        return textwrap.dedent(self.code)

    @property
    def is_fragment(self) -> bool:
        """Is it a part of another block, and indented like that?"""
        return self.code.startswith(" ")

    @property
    def is_a_whole_file(self) -> bool:
        return bool(self.file) and not self.is_fragment and not self.title.endswith(_APPEND)

    @property
    def file(self) -> str:
        """The path of the file that its title names; "" if it names none."""
        name = self.title.removesuffix(_APPEND)
        return name if self.language == "python" and name.endswith(".py") else ""

    def applied_to(self, content: str) -> str:
        """The content of its file after the reader has done what the page says."""
        return f"{content}\n{self.code}" if self.title.endswith(_APPEND) else self.code

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(*languages: str) -> Iterator[Block]:
    """The blocks in one of these languages, page by page."""
    return (block for page in pages() for block in blocks_of(page) if block.language in languages)


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of one page."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        indent, language, title, code = found.groups()
        line = text.count("\n", 0, found.start()) + 2
        code = "".join(each.removeprefix(indent) for each in code.splitlines(keepends=True))
        yield Block(page=page, line=line, language=language, title=title or "", code=code)


def titled_files(page: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The files that a reader of the page has at its end, by path.

    Args:
        given: the files before.
    """
    files = dict(given or {})
    for block in blocks_of(page):
        if block.file:
            files[block.file] = block.applied_to(files.get(block.file, ""))
    return files


def commands(text: str) -> Iterator[list[str]]:
    """The commands of `manage.py` in this shell code, unit, Dockerfile or YAML, each with its arguments."""
    text = _LIST.sub(lambda found: re.sub(r'[\[\]",]', " ", found[0]).replace("  ", " "), text.replace("\\\n", " "))
    for command, arguments in _MANAGE.findall(re.sub(r"manage\.py +", "manage.py ", text)):
        yield [command, *shlex.split(arguments)]

"""The code blocks of README and docs."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
_BLOCK = re.compile(r"^( *)```(\w+)(?: title=\"([^\"]*)\")?[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_MANAGE = re.compile(r"\bmanage\.py (\w+)((?:[ \t]+(?:\"[^\"]*\"|'[^']*'|[^\s\"'|;&<>#(){}]+)+)*)")
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
    def is_signature(self) -> bool:
        """Does it state how functions are declared? That is not Python."""
        try:
            ast.parse(self.source)
        except SyntaxError:
            return True
        return False

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(*languages: str) -> Iterator[Block]:
    """The blocks in one of these languages, page by page."""
    for page in pages():
        text = page.read_text()
        for found in _BLOCK.finditer(text):
            indent, language, title, code = found.groups()
            if language in languages:
                line = text.count("\n", 0, found.start()) + 2
                code = "".join(each.removeprefix(indent) for each in code.splitlines(keepends=True))
                yield Block(page=page, line=line, language=language, title=title or "", code=code)


def commands(text: str) -> Iterator[list[str]]:
    """The commands of `manage.py` in this shell code, unit, Dockerfile or YAML, each with its arguments."""
    text = _LIST.sub(lambda found: re.sub(r'[\[\]",]', " ", found[0]).replace("  ", " "), text.replace("\\\n", " "))
    for command, arguments in _MANAGE.findall(re.sub(r"manage\.py +", "manage.py ", text)):
        yield [command, *shlex.split(arguments)]

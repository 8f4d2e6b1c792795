"""Find the words that `wording.txt` replaces, in everything that people read: `python -m tools.wording`.

It reads the pages in Markdown without their code, the docstrings, comments, texts with a space and names of tests in Python,
and the English texts of the catalogs. It skips names between backquotes.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.support import ROOT

WORDS = Path(__file__).with_name("wording.txt")

Text = tuple[int, str]
"""The number of the first line, and what is written there."""


@dataclass(frozen=True)
class Word:
    """A pattern and what to write instead."""

    pattern: re.Pattern[str]
    instead: str


@dataclass(frozen=True)
class Found:
    """A place where a word has to be replaced."""

    where: str
    line: int
    text: str
    instead: str

    def __str__(self) -> str:
        return f'{self.where}:{self.line}: "{self.text}": write {self.instead}'


def words() -> list[Word]:
    lines = [line for line in WORDS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return [_word(*line.split("->")) for line in lines]


def _word(pattern: str, instead: str) -> Word:
    """A space in a pattern is also the end of a line."""
    anywhere = pattern.strip().replace(" ", r"\s")
    return Word(re.compile(rf"\b(?:{anywhere})\b", re.IGNORECASE), instead.strip())


def findings(files: Iterable[Path], root: Path = ROOT) -> Iterator[Found]:
    patterns = words()
    for path in files:
        for line, text in _texts(path):
            prose = re.sub(r"[ \t]*\n[ \t]*", "\n", re.sub(r"`[^`]*`", _only_its_lines, text))
            for word in patterns:
                for match in word.pattern.finditer(prose):
                    found = " ".join(match[0].split())
                    yield Found(str(path.relative_to(root)), line + prose.count("\n", 0, match.start()), found, word.instead)


def _only_its_lines(code: re.Match[str]) -> str:
    return "`" + "\n" * code[0].count("\n") + "`"


def read_by_people(root: Path = ROOT) -> list[Path]:
    """The files under version control that are read."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(root / name for name in listed.split("\0") if Path(name).suffix in _READERS and (root / name).exists())


def _texts(path: Path) -> Iterator[Text]:
    return _READERS[path.suffix](path.read_text(encoding="utf-8"))


def _of_markdown(source: str) -> Iterator[Text]:
    yield 1, re.sub(r"^ *```.*?^ *```", _only_its_lines, source, flags=re.MULTILINE | re.DOTALL)


def _of_python(source: str) -> Iterator[Text]:
    yield from _comments(source)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if re.search(r"\s", text.strip()):
                yield node.lineno, text
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
                yield node.lineno, name.replace("_", " ")
            case ast.ClassDef(name=name) if name.startswith("Test"):
                yield node.lineno, re.sub(r"(?<!^)(?=[A-Z])", " ", name)


def _comments(source: str) -> Iterator[Text]:
    """Each block of comments as one text, because a sentence may go on in the next line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = [(token.start[0], token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT]
    for _, block in groupby(enumerate(lines), key=lambda numbered: numbered[1][0] - numbered[0]):
        numbers, texts = zip(*(line for _, line in block), strict=True)
        yield numbers[0], "\n".join(texts)


def _of_catalog(source: str) -> Iterator[Text]:
    for number, line in enumerate(source.splitlines(), start=1):
        if line.startswith(("msgid ", "msgid_plural ")):
            yield number, ast.literal_eval(line.partition(" ")[2])


_READERS = {".md": _of_markdown, ".py": _of_python, ".po": _of_catalog}


def main() -> int:
    found = list(findings(read_by_people()))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

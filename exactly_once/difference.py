"""What differs between two texts, line by line, for a person who is about to confirm it."""

import difflib
from collections.abc import Iterator, Sequence

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

_CONTEXT = 3
_MOST_COMPARED = 4_000_000
"""Pairs of lines: comparing more would take seconds. Then all of one side is removed and all of the other added."""
_MOST_SHOWN = 1_000
_BEFORE_THE_FIRST_LINE = 3
"""Lines of a unified diff: the names of both files, and the place of its first part."""
_KINDS = {"+": "ins", "-": "del"}


def difference(before: str, after: str) -> list[str]:
    """Lines that begin with "-" (removed), "+" (added) or " " (context), or are "…" where unchanged lines are left out."""
    old, new = before.splitlines(), after.splitlines()
    begin = _common(old, new)
    end = _common(old[begin:][::-1], new[begin:][::-1])
    lines = [f"  {line}" for line in old[max(begin - _CONTEXT, 0) : begin]]
    lines += _compared(old[begin : len(old) - end], new[begin : len(new) - end])
    lines += [f"  {line}" for line in old[len(old) - end :][:_CONTEXT]]
    return [*(["…"] if begin > _CONTEXT else []), *lines, *(["…"] if end > _CONTEXT else [])]


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many lines at the beginning are the same."""
    return next((number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _compared(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    if len(old) * len(new) > _MOST_COMPARED:
        yield from (f"- {line}" for line in old)
        yield from (f"+ {line}" for line in new)
        return
    for line in list(difflib.unified_diff(old, new, n=_CONTEXT, lineterm=""))[_BEFORE_THE_FIRST_LINE:]:
        yield "…" if line.startswith("@@") else f"{line[0]} {line[1:]}"


def as_html(lines: Sequence[str]) -> SafeString:
    """The difference for a page. Signs distinguish the kinds of lines, for readers who do not see the colours."""
    shown = format_html_join("", '<span class="message-{}">{}\n</span>', ((_kind(line), line) for line in lines[:_MOST_SHOWN]))
    rest = f"… and {len(lines) - _MOST_SHOWN:,} lines more." if len(lines) > _MOST_SHOWN else ""
    return format_html('<pre class="message-text message-difference" tabindex="0">{}{}</pre>', shown, rest)


def _kind(line: str) -> str:
    return _KINDS.get(line[:1], "same")

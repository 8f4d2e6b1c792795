"""Values for pages, commands and reports: numbers and times in the user's language, a payload as text, a difference.

All content of a message is untrusted: it is limited in length, and characters that could disguise a line are made visible. See
`console.admin.html` for what pages make of it.
"""

import difflib
import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.template.defaultfilters import filesizeformat
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.translation import gettext
from django.utils.translation import ngettext as translated

from exactly_once.wire.body import Undecodable, decode_payload
from exactly_once.wire.durations import in_words
from exactly_once.wire.text import visible as visible  # noqa: PLC0414 - pages have it from here

TEXT_LIMIT_BYTES = 64 * 1024
HEX_LIMIT_BYTES = 4 * 1024
EDITABLE_LIMIT = 16 * 1024 * 1024
_ONE_DIGIT = 10


# ----------------------------------------------------------------------------------------------------------------- text

_NOT_PRINTABLE = re.compile(rb"[^\x20-\x7e]")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Text for a page.

    Attributes:
        text: safe to encode, not yet escaped.
        note: what is omitted or could not be read; "" if the text is complete.
    """

    text: str
    note: str = ""


def as_text(text: str) -> Shown:
    """An error, a traceback, a body that is not JSON."""
    text = visible(text)
    encoded = text.encode()
    if len(encoded) <= TEXT_LIMIT_BYTES:
        return Shown(text=text)
    note = gettext("Only the first %(size)s kB are shown.") % {"size": TEXT_LIMIT_BYTES // 1024}
    return Shown(text=encoded[:TEXT_LIMIT_BYTES].decode(errors="ignore"), note=note)


def as_json(value: Any) -> Shown:
    """Decoded headers or another value, as indented JSON."""
    try:
        return as_text(_laid_out(value, TEXT_LIMIT_BYTES))
    except RecursionError:
        return Shown(text="", note=gettext("It is nested too deeply to be formatted."))


def _laid_out(value: Any, limit: int) -> str:
    """The value as indented JSON, cut off soon after `limit` characters."""
    pieces: list[str] = []
    left = limit
    # In pieces: indentation can make a deeply nested body a hundred times longer.
    for piece in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            break
    return "".join(pieces)


def as_editable(value: Any) -> str:
    r"""A decoded payload as complete, indented JSON; invisible and reordering characters are written as `\u202e`.

    Raises:
        RecursionError: it is nested too deeply.
    """
    # Python 3.13 reads 10,000 levels: a body of 20 kB would have 200 MB with its indentation.
    text = _laid_out(value, EDITABLE_LIMIT)
    if len(text) > EDITABLE_LIMIT:
        raise RecursionError("nested too deeply")
    return visible(text)


def as_payload(body: bytes, content_type: str, compression: str = "") -> Shown:
    """A body as JSON; if it cannot be decoded, as text or as bytes, with the reason."""
    try:
        value = decode_payload(body, content_type, compression=compression)
        shown, reason = as_text(_laid_out(value, TEXT_LIMIT_BYTES)), ""
    except Undecodable as error:
        shown, reason = _undecoded(body), str(error)
    except RecursionError:
        shown, reason = _undecoded(body), gettext("The body is nested too deeply to be formatted.")
    words = gettext("%(note)s The body has %(size)s bytes.") % {"note": shown.note, "size": number(len(body))}
    return Shown(text=shown.text, note=visible(f"{reason} {words if shown.note else ''}".strip()))


def _undecoded(body: bytes) -> Shown:
    most = TEXT_LIMIT_BYTES + 4  # one character more than is shown
    try:
        return as_text(getincrementaldecoder("utf-8")().decode(body[:most], final=len(body) <= most))
    except UnicodeDecodeError:
        note = gettext("Only the first %(size)s kB are shown.") % {"size": HEX_LIMIT_BYTES // 1024}
        note = note if len(body) > HEX_LIMIT_BYTES else ""
        return Shown(text="\n".join(_hex_lines(body[:HEX_LIMIT_BYTES])), note=note)


def _hex_lines(body: bytes) -> Iterator[str]:
    for start in range(0, len(body), 16):
        line = body[start : start + 16]
        yield f"{start:06x}  {line.hex(' '):<47}  {_NOT_PRINTABLE.sub(b'.', line).decode()}"


# ---------------------------------------------------------------------------------------------------------- small parts


def number(value: float, digits: int = 0) -> str:
    """A number as the language of the page writes it: "1,234.5", "1.234,5"."""
    return str(number_format(round(value, digits), decimal_pos=digits, force_grouping=True))


def ngettext(singular: str, plural: str, count: int, **values: object) -> str:
    """The form of the sentence for `count`, with `%(count)s` and `values` filled in; makemessages finds it by its name."""
    return translated(singular, plural, count) % {"count": number(count), **values}


def state_in_words(state: str) -> str:
    """The label of a state of either app, which declares it for translation."""
    return gettext(state.replace("_", " ").capitalize())


_SECOND = timedelta(seconds=1)


def relative(instant: datetime, now: datetime) -> str:
    """`instant` as seen from `now`: "3 min ago", "in 20 s"."""
    distance = abs(now - instant)
    if distance < _SECOND:
        return gettext("now")
    words = gettext("in %(time)s") if instant > now else gettext("%(time)s ago")
    return words % {"time": duration(distance)}


def duration(length: timedelta) -> str:
    """A duration as the language of the page writes it: see `in_words`."""
    return in_words(length, number)


def figure(value: float | None) -> str:
    return gettext("unknown") if value is None else number(value)


def seconds_text(seconds: float | None) -> str:
    """A latency, in two significant digits; a percentile has no more."""
    if seconds is None:
        return gettext("unknown")
    for factor, unit in ((1 / 3600, "h"), (1 / 60, "min"), (1.0, "s"), (1000.0, "ms")):
        value = seconds * factor
        if value >= 1 or unit == "ms":
            break
    return f"{number(value, 1 if value < _ONE_DIGIT else 0)} {unit}"


def bytes_text(size: int | None) -> str:
    return gettext("unknown") if size is None else filesizeformat(size)


def until(begin: datetime, end: datetime) -> str:
    """The time from one instant to another, which is short."""
    return brief(end - begin)


def brief(length: timedelta) -> str:
    """A short duration, which may be negative between two clocks: "12 ms", "-3 ms", "1.57 s", "4 s"."""
    if abs(length) < _SECOND:
        return f"{length // timedelta(milliseconds=1)} ms"
    return f"{number(length / _SECOND, 2)} s" if length < 2 * _SECOND else duration(length)


def exact(instant: datetime) -> str:
    # The first and the last day of the calendar may not exist in the time zone.
    with suppress(OverflowError):
        instant = timezone.localtime(instant) if timezone.is_aware(instant) else instant
    return instant.isoformat(sep=" ", timespec="milliseconds")


# ----------------------------------------------------------------------------------------------------------- a difference

_CONTEXT = 3
_MOST_COMPARED = 4_000_000
"""Pairs of lines: comparing more would take seconds. Then all of one side is removed and all of the other added."""
_BEFORE_THE_FIRST_LINE = 3
"""Lines of a unified diff: the names of both files, and the place of its first part."""


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

"""Make external text fit a column, and suggest the name that was meant."""

import hashlib
import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache

NAME_LENGTH = 255
"""Maximum length of a topic, key, biz-id and message id: AMQP's short string limit, which also keeps index rows small."""

ERROR_LENGTH = 2_000
TRACEBACK_LENGTH = 20_000

# Control characters but tab and newline, direction marks that reorder a line, line separators, lone surrogates.
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
fits = re.compile(rf"[ -~]{{,{NAME_LENGTH}}}").fullmatch
"""Is it printable ASCII that is short enough for a name, as nearly all are?"""
_UNFIT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def why_unfit(text: str, *, limit: int = NAME_LENGTH) -> str | None:
    """Why `text` cannot be a name on the wire and in every database, or None if it can."""
    if len(text) <= limit and text.isascii() and text.isprintable():  # most are
        return None
    if unfit := _UNFIT.search(text):
        return f"it contains the control or surrogate character {unfit.group()!r}"
    if (length := len(text.encode())) > limit:
        return f"it is {length} bytes long in UTF-8 and the limit is {limit}"
    return None


def matches(pattern: str, name: str) -> bool:
    """Does `name` match a pattern: a name, or the beginning of names with ".*" after it, or "*" for all?"""
    return pattern in {"*", name} or (pattern.endswith(".*") and name.startswith(pattern[:-1]))


@lru_cache(maxsize=256)  # few topics, checked at every publish
def why_no_topic(text: str) -> str | None:
    """Why `text` cannot be a topic, or None if it can: a topic exchange must take it literally."""
    if not text:
        return "it is empty"
    if set(text.split(".")) & {"*", "#"}:
        return "it contains a wildcard of topic exchanges ('*' or '#' as a word)"
    return why_unfit(text)


def fit(text: str) -> str:
    """A name that fits: `text` itself, or its SHA-256 if it is too long or contains characters that a column refuses.

    Equal texts give equal names, so a deduplication key keeps its meaning. A name is never truncated, because different facts
    must keep different names.
    """
    if fits(text) or why_unfit(text) is None:
        return text
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def encoded(json_text: str) -> bytes:
    r"""JSON in UTF-8, which has no lone surrogates: they are escaped, as JSON may always write them (`\ud83d`)."""
    return json_text.encode("utf-8", "backslashreplace")


def storable(text: str) -> str:
    """This JSON, if every database stores it.

    Raises:
        ValueError: it has a lone surrogate, or a NUL character.
    """
    text.encode()
    if r"\u0000" in text.replace(r"\\", ""):
        raise ValueError("it has a NUL character, which PostgreSQL cannot store")
    return text


def describe(error: BaseException) -> str:
    """The error as one line, never empty, even if its own message is empty or cannot be printed."""
    try:
        said = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - a user's own __str__
        said = "its message cannot be printed"
    return said or type(error).__name__


def visible(text: str) -> str:
    r"""`text` with invisible and reordering characters escaped, as `\u202e`; tabs and newlines remain."""
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def printable(text: str, limit: int) -> str:
    """`text` in a form that a text column accepts, shortened in the middle so that both ends of a traceback remain."""
    text = text.replace("\x00", "�").encode("utf-8", "replace").decode()
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def one_line(text: str, limit: int = NAME_LENGTH) -> str:
    """`text` as one line that fits a column and contains no terminal control characters; it may quote a broker."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that suggests the known name that is closest to a wrong one, in any case; "" if none is close."""
    in_capitals = {each.upper(): each for each in known}
    close = get_close_matches(name.upper(), in_capitals, n=1)
    return f"Did you mean {in_capitals[close[0]]!r}?" if close else ""

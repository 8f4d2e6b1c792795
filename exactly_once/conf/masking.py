"""Mask passwords in settings for log lines and error messages.

Only those parts of a URL are shown that are known to contain no secret. A value that is not recognised is not shown at all:
its type is shown instead.
"""

import re
from urllib.parse import SplitResult, urlsplit

from kombu.transport import TRANSPORT_ALIASES

URL_FORM = "scheme://user:password@host:port/path"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*", re.IGNORECASE)
_HOST = re.compile(r"[a-z0-9._-]*|\[[0-9a-f:.]+\]", re.IGNORECASE)
_PATH = re.compile(r"[a-z0-9._~%+/-]*", re.IGNORECASE)
_WORDS = re.compile(r"(?!.{25})(v?\d{1,4}(\.\d+)?|[a-z]+\d{0,2}([._~-][a-z]+\d{0,2})*)?", re.IGNORECASE | re.ASCII)
_NAME = re.compile(r"[\w.-]{0,60}")
_HIDDEN = "***"


def masked(value: object) -> str:
    """`value`, one URL or several separated by `;`, quoted and without secrets; its type if it does not have that form."""
    urls = value.split(";") if isinstance(value, str) else []
    shown = [_shown(url) for url in urls]
    # In a list every scheme must be known: a password may contain a ';' and text that looks like a scheme.
    if not urls or None in shown or (len(urls) > 1 and not all(map(_has_known_scheme, urls))):
        return f"{kind(value)} (not shown, because it is not {URL_FORM})"
    return repr(";".join(filter(None, shown)))


def quoted(value: object) -> str:
    """`value` quoted if it looks like a name; else its type."""
    return repr(value) if isinstance(value, str) and _NAME.fullmatch(value) else kind(value)


def kind(value: object) -> str:
    """The type of `value` with its article: "a list", "an int", "None"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def masked_path(path: str) -> str:
    """The path of an HTTP URL with only those segments that are short words, numbers or versions; others may be secrets."""
    return "/".join(segment if _WORDS.fullmatch(segment) else _HIDDEN for segment in path.split("/"))


def is_url(text: str) -> bool:
    """Does `text` begin like a URL?"""
    scheme, separator, _ = text.partition("://")
    return bool(separator and _SCHEME.fullmatch(scheme))


def why_unreadable(url: str) -> str | None:
    """Why the host and port of `url` cannot be parsed, or None. A library's own error might quote a part of the password."""
    if _split(url.partition("://")[2]) is not None:
        return None
    return "its host or port cannot be read; in a user or password write '/', '?', '#' and ';' as %2F, %3F, %23 and %3B"


def _split(rest: str) -> tuple[SplitResult, int | None] | None:
    """The parsed text after the scheme, and the port; None if it cannot be parsed."""
    try:
        # Like kombu, parse every scheme by the rules of http.
        parts = urlsplit(f"http://{rest}")
        port = parts.port
    except ValueError:
        return None
    return parts, port


def _shown(url: str) -> str | None:
    scheme, _, rest = url.partition("://")
    if not is_url(url) or (split := _split(rest)) is None:
        return None
    parts, port = split
    credentials, at, host = parts.netloc.rpartition("@")
    host = host if port is None else host.rpartition(":")[0]
    tail = parts.query + parts.fragment
    # An '@' in the tail may end credentials that contain a '?' or a '#'.
    if "@" in tail or not _HOST.fullmatch(host) or not _PATH.fullmatch(parts.path):
        return None
    # The user is hidden, too: that part is often a password, as with Redis.
    who = f"{_HIDDEN if credentials else ''}{at}"
    path = masked_path(parts.path) if scheme.lower() in {"http", "https"} else parts.path
    return f"{scheme}://{who}{host}{'' if port is None else f':{port}'}{path}{f'?{_HIDDEN}' if tail else ''}"


def _has_known_scheme(url: str) -> bool:
    return url.partition("://")[0].partition("+")[0].lower() in {*TRANSPORT_ALIASES, "local"}

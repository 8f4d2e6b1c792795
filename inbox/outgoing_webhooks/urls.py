"""The URL of an endpoint: what it may be, and how an error shows it."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from django.utils.translation import gettext

from exactly_once.masking import masked_path
from exactly_once.wire.text import why_unfit

LONGEST = 2000
_PORTS = {"http": 80, "https": 443}


def why_no_url(url: str) -> str | None:
    """Why requests cannot be sent to `url`, for the operator who enters it; None if they can."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return gettext("It is not a URL.")
    if parts.scheme not in _PORTS or not parts.hostname:
        return gettext("It must be a URL like https://example.com/webhooks.")
    if not url.isascii() or " " in url or why_unfit(url, limit=LONGEST):
        return gettext(
            "It must have ASCII characters only, without spaces. Write others percent-encoded, and the host in Punycode."
        )
    if parts.username is not None or parts.password is not None:
        return gettext("It must not contain a user or a password.")
    if parts.fragment or port == 0:
        return gettext("It must not have a fragment, and its port must not be 0.")
    return None


def port_of(parts: SplitResult) -> int:
    return parts.port or _PORTS[parts.scheme]


def shown(url: str) -> str:
    """The URL without what may be a secret: its query, and parts of its path."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{masked_path(parts.path)}{'?…' if parts.query else ''}"

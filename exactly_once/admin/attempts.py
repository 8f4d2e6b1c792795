"""The failed attempts of a message on its admin page: the newest first, the project's own frames before those of libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.timeline import reason
from exactly_once.display import as_text, exact, identifier, visible


def attempts(failures: Sequence[Any], error: str = "") -> SafeString:
    """Each failed attempt as a part that can be unfolded; the newest is unfolded. An error is shown once.

    Args:
        error: is shown above.
    """
    found = [failure for failure in reversed(failures) if isinstance(failure, Mapping)]
    earlier = [error, *(str(failure.get("error", "")) for failure in found)]
    parts = ((_attempt(failure, earlier[: number + 1]),) for number, failure in enumerate(found))
    return format_html('<div class="message-block">{}</div>', format_html_join("", "{}", parts))


def _attempt(failure: Mapping[str, Any], earlier: Sequence[str]) -> SafeString:
    error = str(failure.get("error", ""))
    own, complete = (_without(error, str(failure.get(name, ""))) for name in ("own", "traceback"))
    place = failure.get("place")
    return format_html(
        '<details class="message-attempt"{}><summary>{} {}: {}{}</summary>{}{}{}</details>',
        SafeString(" open") if len(earlier) == 1 else "",
        _("Attempt %(number)s") % {"number": failure.get("attempt", "?")},
        format_html('<span class="message-quiet message-age">{}</span>', _instant(str(failure.get("at", "")))),
        identifier(str(failure.get("class", ""))),
        format_html(" {} {}", _("in"), identifier(str(place))) if place else "",
        reason(error, earlier) if error else "",
        as_text(own).as_html() if own else "",
        format_html(
            '<details class="message-frames"><summary>{}</summary>{}</details>',
            _("Complete traceback, with the frames of libraries"),
            as_text(complete).as_html(),
        )
        if complete
        else "",
    )


def _without(error: str, frames: str) -> str:
    """The frames of a traceback without the line that names the exception."""
    text = error.partition(": ")[2] or error
    return re.sub(rf"\n[^\n]*{re.escape(text)}\s*\Z", "", frames) if text else frames


def _instant(text: str) -> str:
    try:
        return exact(datetime.fromisoformat(text))
    except ValueError:
        return visible(text)

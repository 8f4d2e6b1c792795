"""The failed attempts of a message on its admin page: the newest first, the project's own frames before those of libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from exactly_once.display import as_text, exact, identifier, visible


def attempts(failures: Sequence[Any]) -> SafeString:
    """Each failed attempt as a part that can be unfolded; the newest is unfolded."""
    found = [failure for failure in reversed(failures) if isinstance(failure, Mapping)]
    parts = format_html_join("", "{}", ((_attempt(failure, first=number == 0),) for number, failure in enumerate(found)))
    return format_html('<div class="message-block">{}</div>', parts)


def _attempt(failure: Mapping[str, Any], *, first: bool) -> SafeString:
    own, complete = str(failure.get("own", "")), str(failure.get("traceback", ""))
    place = failure.get("place")
    return format_html(
        '<details class="message-attempt"{}><summary>{} {}: {}{}</summary>{}{}{}</details>',
        SafeString(" open") if first else "",
        _("Attempt %(number)s") % {"number": failure.get("attempt", "?")},
        format_html('<span class="message-quiet message-age">{}</span>', _instant(str(failure.get("at", "")))),
        identifier(str(failure.get("class", ""))),
        format_html(" {} {}", _("in"), identifier(str(place))) if place else "",
        as_text(str(failure.get("error", ""))).as_html(),
        as_text(own).as_html() if own else "",
        format_html(
            '<details class="message-frames"><summary>{}</summary>{}</details>',
            _("Complete traceback, with the frames of libraries"),
            as_text(complete).as_html(),
        )
        if complete
        else "",
    )


def _instant(text: str) -> str:
    try:
        return exact(datetime.fromisoformat(text))
    except ValueError:
        return visible(text)

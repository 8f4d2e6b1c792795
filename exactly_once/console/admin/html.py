"""Parts of pages as HTML: a state as a badge, an instant as an age, an id, a block of text, a correction as a difference.

All content of a message is untrusted. It reaches the page through `format_html` only, see `console.display` for the values.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from typing import Any

from django.apps import apps
from django.utils.functional import Promise
from django.utils.html import format_html, format_html_join
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.text import Truncator

from exactly_once.console.display import Shown, as_text, exact, relative, state_in_words
from exactly_once.wire.text import visible

NOTHING = SafeString("-")
_PIECE = re.compile(r"[^._/:-]+[._/:-]*|[._/:-]+")
_MOST_SHOWN = 1_000
_KINDS = {"+": "ins", "-": "del"}


class Tone(Enum):
    """The kind of a state, shown as a sign and a colour; its name is the class in the style sheet."""

    DONE = "✓"
    OPEN = "▸"
    LATER = "◷"
    FAILING = "↻"
    STOPPED = "✕"
    OVER = "○"


def badge(label: object, tone: Tone) -> SafeString:
    sign = format_html('<span aria-hidden="true">{}</span>', tone.value)
    return format_html('<span class="message-state message-state-{}">{} {}</span>', tone.name.lower(), sign, label)


_TONES = {
    **dict.fromkeys(["published", "done"], Tone.DONE),
    **dict.fromkeys(["ready", "received", "running"], Tone.OPEN),
    **dict.fromkeys(["prepared", "scheduled", "waiting", "paused", "later"], Tone.LATER),
    **dict.fromkeys(["retrying"], Tone.FAILING),
    **dict.fromkeys(["dead", "stuck"], Tone.STOPPED),
}
"""By the name of a state in either app; the default is `Tone.OVER`."""


def state_badge(state: str) -> SafeString:
    """A state of either app."""
    return badge(state_in_words(state), _TONES.get(state, Tone.OVER))


def app_name(app: str) -> SafeString:
    """The name of a half, as the admin shows it."""
    return format_html("{}", next((config.verbose_name for config in apps.get_app_configs() if config.name == app), app))


def age(instant: datetime | None, now: datetime, prefix: str = "") -> SafeString:
    """The time since or until `instant`; a tooltip shows the exact instant."""
    if instant is None:
        return NOTHING
    words = f"{prefix}{relative(instant, now)}"
    html = '<time class="message-age" datetime="{}" title="{}">{}</time>'
    return format_html(html, instant.isoformat(), exact(instant), words)


def clock(instant: datetime) -> SafeString:
    """The instant to the second, in the site's time zone; a tooltip shows the exact instant."""
    return format_html('<span class="message-name message-age" title="{}">{}</span>', exact(instant), exact(instant)[:19])


def moment(instant: datetime | None, now: datetime) -> SafeString:
    """The exact instant and its age."""
    return format_html('<span class="message-name">{}</span> ({})', exact(instant), age(instant, now)) if instant else NOTHING


def identifier(text: str) -> SafeString:
    """An id, a key or a topic, for copying; a line may break after its punctuation."""
    pieces = ((piece,) for piece in _PIECE.findall(visible(text) or NOTHING))
    return format_html('<bdi class="message-name">{}</bdi>', format_html_join("", "{}<wbr>", pieces))


def flow_link(row: Any, name: object) -> SafeString:
    """A message id or a correlation id, with a link to its flow if `row` was loaded for a user who may view that."""
    return id_link(getattr(row, "flow_url", ""), name)


def id_link(address: str, name: object) -> SafeString:
    """A message id or a correlation id, with a link to its flow on the page at this address; "" for no link."""
    if not (name and address):
        return identifier(str(name))
    return format_html('<a href="{}?{}">{}</a>', address, urlencode({"id": str(name)}), identifier(str(name)))


def note(words: object) -> SafeString:
    """A remark of the console."""
    return format_html('<p class="message-note">{}</p>', words)


def warning(words: str | Promise) -> SafeString:
    """A warning of the console."""
    return format_html('<p class="message-warning">{}</p>', words)


def folded(summary: object, content: SafeString) -> SafeString:
    """A part that is hidden until the operator asks for it."""
    return format_html('<details class="message-block message-folded"><summary>{}</summary>{}</details>', summary, content)


def stacked(*lines: object) -> SafeString:
    """Several lines in one cell of a list."""
    return format_html_join("", '<span class="message-line">{}</span>', ((line,) for line in lines))


def labelled(label: object, value: object) -> SafeString:
    """A cell of a list whose label is shown where the list has no columns, on a narrow window."""
    return format_html('<span class="message-label">{}: </span>{}', label, value)


def headline(error: str) -> SafeString:
    """The first line of an error, for a list."""
    lines = error.strip().splitlines()
    return format_html("{}", Truncator(visible(lines[0])).chars(120) if lines else NOTHING)


def as_html(shown: Shown) -> SafeString:
    """A block of text."""
    if not (shown.text or shown.note):
        return NOTHING
    remark = note(shown.note) if shown.note else ""
    content = format_html('<pre class="message-text" tabindex="0">{}</pre>', shown.text) if shown.text else ""
    return format_html('<div class="message-block">{}{}</div>', remark, content)


def text(value: str) -> SafeString:
    """A text of several lines."""
    return as_html(as_text(value))


def difference_as_html(lines: Sequence[str]) -> SafeString:
    """The difference for a page. Signs distinguish the kinds of lines, for readers who do not see the colours."""
    pairs = ((_KINDS.get(line[:1], "same"), line) for line in lines[:_MOST_SHOWN])
    shown = format_html_join("", '<span class="message-{}">{}\n</span>', pairs)
    rest = f"… and {len(lines) - _MOST_SHOWN:,} lines more." if len(lines) > _MOST_SHOWN else ""
    return format_html('<pre class="message-text message-difference" tabindex="0">{}{}</pre>', shown, rest)

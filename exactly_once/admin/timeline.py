"""The history of a message on its page: every transition in order of time, its present states, and its failed attempts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.display import Tone, age, as_text, badge, brief, exact, identifier, note, state_badge, state_in_words, visible
from exactly_once.operators.trail import HistoryEvent, MessageHistory, PresentState
from exactly_once.plurals import ngettext
from exactly_once.process.clock import utcnow

_MOST_NAMESAKES = 10


def timeline(
    history: MessageHistory, may_see: Callable[[str], bool], link: Callable[[str], SafeString], hidden: str, error: str
) -> SafeString:
    """The transitions that the user may see. A text is shown once.

    Args:
        may_see: may the user see moments with this `where`, "outbox" or the name of a handler?
        link: a message id with the link that it has on this page.
        hidden: a sentence for users who may not see all of them.
        error: is shown above.
    """
    moments = [moment for moment in history.moments if may_see(moment.where)]
    words = list(history.unknown)
    if len(moments) < len(history.moments):
        words.append(hidden)
    if history.namesakes:
        named = format_html_join(", ", "{}", ((link(other),) for other in history.namesakes[:_MOST_NAMESAKES]))
        more = ", …" if len(history.namesakes) > _MOST_NAMESAKES else ""
        sentence = gettext("Other messages with this topic and biz-id, of which a handler runs one: {}{}.")
        words.append(format_html(sentence, named, more))
    entries = format_html_join("", '<li class="message-moment">{}</li>', ((entry,) for entry in _entries(moments, error)))
    now = [standing for standing in history.standings if may_see(standing.where)]
    return format_html(
        '<ol class="message-timeline">{}</ol>{}{}',
        entries,
        _standings(now),
        format_html_join("", "{}", ((note(sentence),) for sentence in words)),
    )


def _entries(moments: Sequence[HistoryEvent], error: str) -> Iterator[SafeString]:
    before: datetime | None = None
    earlier = [error]
    for moment in moments:
        yield format_html(
            '<span class="message-when"><time datetime="{}">{}</time>{}</span>'
            '<span class="message-what">{}{} <span class="message-where">{}</span>{}{}</span>',
            moment.at.isoformat(),
            exact(moment.at),
            _since(before, moment.at),
            format_html('<span class="message-from">{} →</span> ', state_in_words(moment.was)) if moment.was else "",
            state_badge(moment.became),
            _where(moment),
            format_html('<span class="message-line message-quiet">{}</span>', identifier(moment.process))
            if moment.process
            else "",
            reason(moment.reason, earlier) if moment.reason else "",
        )
        earlier.append(moment.reason)
        before = moment.at


def reason(text: str, earlier: Sequence[str]) -> SafeString:
    """The text, or a remark if it has been shown already, perhaps with the class of the exception before it."""
    if any(each and (each.endswith(text) or text.endswith(each)) for each in earlier):
        return format_html('<span class="message-line message-quiet">{}</span>', gettext("The same error as above."))
    return as_text(text).as_html()


def _since(before: datetime | None, at: datetime) -> SafeString:
    """The time since the previous moment."""
    if before is None or at <= before:
        return format_html("{}", "")
    return format_html(' <span class="message-quiet">{}</span>', gettext("%(time)s later") % {"time": brief(at - before)})


def _standings(standings: Sequence[PresentState]) -> SafeString:
    """The present states of the message, one line each."""
    rows = (
        (
            _standing_badge(standing),
            _where(standing),
            ", ".join(chain([_attempts(standing)], filter(None, [visible(standing.also)]))),
            format_html(", {}", age(standing.due, utcnow(), gettext("due "))) if standing.due else "",
        )
        for standing in standings
    )
    return format_html(
        '<h3 class="message-now">{}</h3><ul class="message-standings">{}</ul>',
        gettext("Now"),
        format_html_join("", "<li>{} {}: {}{}</li>", rows),
    )


def _standing_badge(standing: PresentState) -> SafeString:
    if standing.deferred:
        return badge(_("Later"), Tone.LATER)
    return state_badge(standing.state)


def _where(of: HistoryEvent | PresentState) -> SafeString:
    named = of.where if of.database == "default" else f"{of.where} ({of.database})"
    return identifier(named)


def _attempts(standing: PresentState) -> str:
    return ngettext("%(count)s attempt", "%(count)s attempts", standing.attempts)


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

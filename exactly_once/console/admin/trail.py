"""The history of messages: that of one on its page, and the page of flows, which shows a chain.

The page of a message has every transition in order of time, its present states, and its failed attempts. A chain is found by
its correlation id, and shows each publish, its effects, and what its handlers published.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils.safestring import SafeString

from exactly_once.console.admin.pages import PageAdmin, message_url
from exactly_once.console.display import exact, visible
from exactly_once.console.operators.message_history import MOST_ROWS, MessageHistory, chain_of
from exactly_once.console.operators.trail import ChainRow
from exactly_once.half import visible_halves
from exactly_once.models import Flow
from exactly_once.process.clock import utcnow
from exactly_once.wire.text import fit

_MOST_NAMESAKES = 10
_DEEPEST = 8
"""Deeper messages are drawn at this depth: a narrow window has no room for more."""


def timeline(history: MessageHistory, may_see: Callable[[str], bool], flow: str, hidden: str, error: str) -> SafeString:
    """The transitions that the user may see. A text is shown once.

    Args:
        may_see: may the user see moments with this `where`, "outbox" or the name of a handler?
        flow: the address of the page of flows, see `display.id_link`.
        hidden: a sentence for users who may not see all of them.
        error: is shown above.
    """
    moments = [moment for moment in history.moments if may_see(moment.where)]
    said = _said([error], (moment.reason for moment in moments))
    content = {
        "moments": list(zip(moments, [None, *(moment.at for moment in moments)], said, strict=False)),
        "standings": [standing for standing in history.standings if may_see(standing.where)],
        "notes": [*history.unknown, *([hidden] if len(moments) < len(history.moments) else [])],
        "namesakes": history.namesakes[:_MOST_NAMESAKES],
        "more": ", …" if len(history.namesakes) > _MOST_NAMESAKES else "",
        "flow": flow,
        "now": utcnow(),
    }
    return render_to_string("exactly_once/timeline.html", content)


def _said(earlier: list[str], texts: Iterable[str]) -> Iterator[bool]:
    """Has each of these texts been shown before it, perhaps with the class of the exception before it?"""
    for text in texts:
        yield any(each and (each.endswith(text) or text.endswith(each)) for each in earlier)
        earlier.append(text)


def attempts(failures: Sequence[Any], error: str = "") -> SafeString:
    """Each failed attempt as a part that can be unfolded; the newest is unfolded. An error is shown once.

    Args:
        error: is shown above.
    """
    found = [failure for failure in reversed(failures) if isinstance(failure, Mapping)]
    said = _said([error], (str(failure.get("error", "")) for failure in found))
    shown = [{**failure, **_parts(failure), "is_said": is_said} for failure, is_said in zip(found, said, strict=True)]
    return render_to_string("exactly_once/attempts.html", {"attempts": shown})


def _parts(failure: Mapping[str, Any]) -> dict[str, str]:
    """Its texts, the frames without the line that names the exception, and its instant."""
    texts = {name: str(failure.get(name) or "") for name in ("class", "place", "error", "own", "traceback", "at")}
    error = texts["error"].partition(": ")[2] or texts["error"]
    if error:
        for name in ("own", "traceback"):
            texts[name] = re.sub(rf"\n[^\n]*{re.escape(error)}\s*\Z", "", texts[name])
    try:
        return {**texts, "at": exact(datetime.fromisoformat(texts["at"]))}
    except ValueError:
        return {**texts, "at": visible(texts["at"])}


@admin.register(Flow)
class FlowAdmin(PageAdmin):
    """One chain, found by its correlation id or the id of one of its messages."""

    template = "exactly_once/flow.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        name = fit(request.GET.get("id", "").strip())
        if not name:
            return {"name": ""}
        chain = chain_of(name, apps=[half.app for half in visible_halves(request.user)])
        by_id = {message.message_id: message for message in chain.messages}
        return {
            "name": name,
            "address": request.path,
            "using": self.using,
            "correlation_id": chain.correlation_id,
            "chain": [
                {
                    "of": message,
                    "depth": min(message.depth, _DEEPEST),
                    "cause": by_id.get(message.first.causation_id),
                    "url": self._url(message.publication),
                    "effects": [(row, self._url(row)) for row in message.effects],
                }
                for message in chain.messages
            ],
            "is_cut": chain.is_cut,
            "most": MOST_ROWS,
            "unavailable": ", ".join(chain.unavailable),
        }

    def _url(self, row: ChainRow | None) -> str:
        return message_url(self.admin_site, row.app, row.pk) if row and row.database == self.using else ""

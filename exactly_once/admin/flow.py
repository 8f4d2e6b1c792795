"""The flow of messages: a chain by its correlation id, from each publish to its effects and to what its handlers published."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from exactly_once.admin.pages import PageAdmin, may_see_messages, message_url
from exactly_once.models import Flow
from exactly_once.operators.trail import MOST_ROWS, ChainRow, apps_asked, chain_of
from exactly_once.wire.text import fit

_DEEPEST = 8
"""Deeper messages are drawn at this depth: a narrow window has no room for more."""


@admin.register(Flow)
class FlowAdmin(PageAdmin):
    """One chain, found by its correlation id or the id of one of its messages."""

    template = "exactly_once/flow.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        name = fit(request.GET.get("id", "").strip())
        if not name:
            return {"name": ""}
        chain = chain_of(name, apps=[app for app in apps_asked() if may_see_messages(request, app)])
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

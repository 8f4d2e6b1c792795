"""The flow of messages: a chain by its correlation id, from each publish to its effects and to what its handlers published."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from exactly_once.admin.pages import PageAdmin, may_see_messages, message_url
from exactly_once.admin.timeline import state_badge
from exactly_once.display import brief, exact, headline, id_link, identifier
from exactly_once.models import Flow
from exactly_once.operators.trail import MOST_ROWS, ChainedMessage, ChainRow, apps_asked, chain_of
from exactly_once.plurals import ngettext
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
        apps = [app for app in apps_asked() if may_see_messages(request, app)]
        chain = chain_of(name, apps=apps)
        by_id = {message.message_id: message for message in chain.messages}
        return {
            "name": name,
            "correlation_id": identifier(chain.correlation_id),
            "chain": [self._message(each, by_id.get(each.first.causation_id), name, request.path) for each in chain.messages],
            "is_cut": chain.is_cut,
            "most": MOST_ROWS,
            "unavailable": ", ".join(chain.unavailable),
        }

    def _message(self, message: ChainedMessage, cause: ChainedMessage | None, name: str, address: str) -> dict[str, Any]:
        first, sent = message.first, message.publication
        published_at = first.published_at or first.began_at
        times = [format_html('<time datetime="{}">{}</time>', published_at.isoformat(), exact(published_at))]
        if cause is not None:
            times.append(_after(cause.first.published_at or cause.first.began_at, published_at, _("%(time)s after its cause")))
        if sent is not None and sent.state == "published" and sent.settled_at:
            times.append(_after(published_at, sent.settled_at, _("confirmed %(time)s later")))
        return {
            "depth": min(message.depth, _DEEPEST),
            "level": message.depth + 1,
            "is_meant": message.message_id == name,
            "badge": state_badge(sent.state) if sent else "",
            "url": self._url(sent) if sent else "",
            "topic": identifier(first.topic),
            "biz_id": identifier(first.biz_id),
            "message_id": identifier(message.message_id),
            "times": times,
            "error": headline(sent.error) if sent and sent.error else "",
            "database": sent.database if sent and sent.database != self.using else "",
            "elsewhere": id_link(address, message.elsewhere) if message.elsewhere else "",
            "effects": [self._effect(row, published_at) for row in message.effects],
        }

    def _effect(self, row: ChainRow, published_at: datetime) -> dict[str, Any]:
        times = [_after(published_at, row.began_at, _("received %(time)s after it was published"))]
        if row.settled_at:
            words = _("effect %(time)s later") if row.state == "done" else _("settled %(time)s later")
            times.append(_after(row.began_at, row.settled_at, words))
        if row.attempts > 1 or not row.settled_at:
            times.append(format_html("{}", ngettext("%(count)s attempt", "%(count)s attempts", row.attempts)))
        return {
            "badge": state_badge(row.state),
            "url": self._url(row),
            "handler": identifier(row.where),
            "times": times,
            "error": headline(row.error) if row.error and row.state != "done" else "",
            "database": row.database if row.database != self.using else "",
        }

    def _url(self, row: ChainRow) -> str:
        return message_url(self.admin_site, row.app, row.pk) if row.database == self.using else ""


def _after(begin: datetime, end: datetime, words: str) -> SafeString:
    return format_html('<span title="{}">{}</span>', exact(end), words % {"time": brief(end - begin)})

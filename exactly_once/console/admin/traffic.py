"""Topics and handlers: a row for each topic of the outbox and each handler of the inbox, with what waits and what fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.pages import PageAdmin
from exactly_once.console.admin.paused import pause_badge, paused_by
from exactly_once.console.admin.sections import Text, listed
from exactly_once.console.display import number
from exactly_once.console.operators.changes import permission
from exactly_once.half import Half, visible_halves
from exactly_once.models import TopicsAndHandlers
from exactly_once.sql.counts import Count
from exactly_once.telemetry.statistics import Counted, percentile
from exactly_once.upkeep.minutes import LATELY, OTHER, database_time

_MOST = 200
_FAILING = (("retrying", _("retrying")), ("dead", _("dead")))


@admin.register(TopicsAndHandlers)
class TopicsAndHandlersAdmin(PageAdmin):
    template = "exactly_once/traffic.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        prefix = request.GET.get("prefix", "")
        return {
            "parts": [self._part(request, half, prefix) for half in visible_halves(request.user)],
            "prefix": prefix,
            "all_url": request.path,
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
            "minutes": LATELY // timedelta(minutes=1),
        }

    def _part(self, request: HttpRequest, half: Half, prefix: str) -> dict[str, Any]:
        alias, now, section = self.using, database_time(self.using), half.section
        counts = section.traffic(alias)
        paused = {getattr(row, section.kind): row for row in section.paused.objects.using(alias)}
        lately = section.minutes.by_subject(alias, LATELY)
        busy = {name for each in counts.values() for name in each} | paused.keys() | (lately.keys() - {OTHER})
        names = dict.fromkeys([*sorted(busy), *section.names(alias, 10_000 if prefix else _MOST + 1)])
        depths, remarks = section.depths(alias), section.remarks(alias)
        rows = []
        for name in (name for name in names if name.startswith(prefix)):
            of_name = {state: _count(each, name) for state, each in counts.items()}
            rows.append(_Row(name, of_name, section.backlog, paused.get(name), remarks.get(name, ""), depths.get(name)))
        rows.sort(key=lambda row: row.rank)
        paused_url = listed(section.paused).url(self.admin_site, request)
        return {
            "title": half.groups_label,
            "kind": section.kind,
            "has_queues": bool(depths),
            "is_cut": len(rows) > _MOST,
            "most": _MOST,
            "may_pause": request.user.has_perm(permission(section.paused, "pause")),
            "may_resume": paused_url and request.user.has_perm(permission(section.paused, "resume")),
            "paused_url": paused_url,
            "rows": [self._shown(half, row, lately.get(row.name)) for row in rows[:_MOST]],
            "now": now,
        }

    def _shown(self, half: Half, row: _Row, counted: Counted | None) -> dict[str, Any]:
        section = half.section
        query = {section.kind: row.name}
        url, pause_url = (
            reverse(f"{self.admin_site.name}:{model._meta.app_label}_{model._meta.model_name}_{page}", query=query)
            for model, page in ((half.messages, "changelist"), (section.paused, "add"))
        )
        counted = counted or Counted()
        histogram: Mapping[int, int] = counted.times.get(section.lag[0], {})
        return {
            "of": row,
            "topics": section.topic_of(row.name) if section.topic_of else "",
            "url": url,
            "rate": number(counted.counts[section.numbers[0][1][0]] / (LATELY / timedelta(minutes=1)), 1),
            "percentiles": [(name, percentile(histogram, share)) for name, share in (("p50", 0.5), ("p95", 0.95))],
            "failing": [(label, row.counts[state], state) for state, label in _FAILING if row.counts[state].number],
            "pause_url": pause_url,
            "paused_badge": row.paused and pause_badge(row.paused),
            "paused_by": row.paused and paused_by(row.paused),
        }


class _Row:
    """A topic or handler; `queue` is the number of messages in its queues at the broker, None if that is unknown."""

    def __init__(
        self, name: str, counts: Mapping[str, Count], backlog: Sequence[str], paused: Any, remark: Text, queue: int | None
    ) -> None:
        waiting = [counts[state] for state in backlog]
        oldest = [count.oldest for count in waiting if count.oldest is not None]
        self.name, self.counts, self.paused, self.remark, self.queue = name, counts, paused, remark, queue
        self.backlog = Count(
            number=sum(count.number for count in waiting),
            is_cut=any(count.is_cut for count in waiting),
            oldest=min(oldest, default=None),
        )

    @property
    def rank(self) -> tuple[bool, int, int, str]:
        """Those that fail or are paused come first, then those with the largest backlog."""
        failing = self.counts["dead"].number + self.counts["retrying"].number
        is_well = not (failing or self.paused or self.remark)
        return is_well, -failing, -self.backlog.number - (self.queue or 0), self.name


def _count(each: Mapping[str, Count], name: str) -> Count:
    """Where not all messages of a state were counted, a name without a count may have some."""
    return each.get(name) or Count(is_cut=any(count.is_cut for count in each.values()))

"""Topics and handlers: a row for each topic of the outbox and each handler of the inbox, with what waits and what fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.http import HttpRequest
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _

from exactly_once.admin.pages import PageAdmin, may_see_messages
from exactly_once.admin.paused import pause_badge
from exactly_once.admin.sections import Text, seconds_text
from exactly_once.display import NOTHING, age, headline, identifier
from exactly_once.models import TopicsAndHandlers
from exactly_once.operators.minutes import OTHER, Minutes, database_time
from exactly_once.sql.counts import Count
from exactly_once.sql.labels import label_of
from exactly_once.telemetry.statistics import Counted, percentile

_MOST = 200
_LATELY = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one app shows.

    Attributes:
        app: its package.
        kind: "topic" or "handler": the column of its paused names, and the filter of its messages.
        backlog: the states of messages that wait for their turn.
        counts: the messages by state and name, of the states in `backlog`, "retrying" and "dead".
        names: those that are known otherwise, up to a number.
        minutes: its statistics.
        done, lag: the names in them of the number of finished messages, and of the durations until they were finished.
        depths: the number of messages in the queues of each name, as far as the broker reports it; None if it does not.
    """

    app: str
    kind: str
    title: Text
    backlog: Sequence[str]
    counts: Callable[[str], Mapping[str, Mapping[str, Count]]]
    names: Callable[[str, int], Sequence[str]]
    minutes: Minutes
    done: str
    lag: str
    paused: Any
    depths: Callable[[], Mapping[str, int] | None]

    def page(self, name: str) -> str:
        """The name of a page of its pauses."""
        return f"{label_of(self.app)}_paused{self.kind}_{name}"

    def permission(self, action: str) -> str:
        return f"{label_of(self.app)}.{action}_paused{self.kind}"


_traffic: dict[str, Traffic] = {}


def register_traffic(traffic: Traffic) -> None:
    """Register the topics or handlers of an app. A second call for an app replaces the first."""
    _traffic[traffic.app] = traffic


@admin.register(TopicsAndHandlers)
class TopicsAndHandlersAdmin(PageAdmin):
    template = "exactly_once/traffic.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        shown = [_traffic[app] for app in sorted(_traffic, reverse=True) if may_see_messages(request, app)]
        return {
            "parts": [self._part(request, traffic) for traffic in shown],
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
            "minutes": _LATELY // timedelta(minutes=1),
        }

    def _part(self, request: HttpRequest, traffic: Traffic) -> dict[str, Any]:
        alias, now = self.using, database_time(self.using)
        counts = traffic.counts(alias)
        paused = {getattr(row, traffic.kind): row for row in traffic.paused.using(alias)}
        lately = traffic.minutes.by_subject(alias, _LATELY)
        busy = {name for each in counts.values() for name in each} | paused.keys() | (lately.keys() - {OTHER})
        names = dict.fromkeys([*sorted(busy), *traffic.names(alias, _MOST + 1)])
        depths = traffic.depths()
        rows = [
            _Row(name, {state: _count(each, name) for state, each in counts.items()}, traffic.backlog, paused.get(name))
            for name in names
        ]
        rows.sort(key=lambda row: row.rank)
        may_see_paused = request.user.has_perm(traffic.permission("view"))
        return {
            "title": traffic.title,
            "kind": traffic.kind,
            "has_queues": depths is not None,
            "is_cut": len(rows) > _MOST,
            "most": _MOST,
            "may_pause": request.user.has_perm(traffic.permission("pause")),
            "may_resume": may_see_paused and request.user.has_perm(traffic.permission("resume")),
            "paused_url": reverse(f"{self.admin_site.name}:{traffic.page('changelist')}") if may_see_paused else "",
            "rows": [self._shown(traffic, row, lately.get(row.name), depths or {}, now) for row in rows[:_MOST]],
        }

    def _shown(
        self, traffic: Traffic, row: _Row, counted: Counted | None, depths: Mapping[str, int], now: datetime
    ) -> dict[str, Any]:
        site, messages = self.admin_site.name, f"{label_of(traffic.app)}_{traffic.app}message_changelist"
        address = reverse(f"{site}:{messages}")
        named = {traffic.kind: row.name}
        counted = counted or Counted()
        histogram: Mapping[int, int] = counted.times.get(traffic.lag, {})
        paused = row.paused
        return {
            "name": identifier(row.name),
            "url": f"{address}?{urlencode(named)}",
            "backlog": _at_least(row.backlog),
            "oldest": age(row.backlog.oldest, now),
            "rate": f"{counted.counts[traffic.done] / (_LATELY / timedelta(minutes=1)):,.1f}",
            "p50": _seconds(histogram, 0.5),
            "p95": _seconds(histogram, 0.95),
            "failing": [
                (label, _at_least(row.counts[state]), f"{address}?{urlencode({**named, 'state': state})}")
                for state, label in (("retrying", _("retrying")), ("dead", _("dead")))
                if row.counts[state].number
            ],
            "queue": f"{depths[row.name]:,}" if row.name in depths else NOTHING,
            "paused": paused and {
                "row": paused.pk,
                "badge": pause_badge(paused),
                "is_resuming": getattr(paused, "is_resuming", False),
                "by": identifier(paused.paused_by or _("circuit breaker")),
                "since": age(paused.paused_at, now),
                "reason": headline(paused.reason) if paused.reason else "",
            },
            "pause_url": f"{reverse(f'{site}:' + traffic.page('add'))}?{urlencode(named)}",
        }  # fmt: skip


class _Row:
    def __init__(self, name: str, counts: Mapping[str, Count], backlog: Sequence[str], paused: Any) -> None:
        waiting = [counts[state] for state in backlog]
        oldest = [count.oldest for count in waiting if count.oldest is not None]
        self.name, self.counts, self.paused = name, counts, paused
        self.backlog = Count(
            number=sum(count.number for count in waiting),
            is_cut=any(count.is_cut for count in waiting),
            oldest=min(oldest, default=None),
        )

    @property
    def rank(self) -> tuple[bool, int, int, str]:
        """Those that fail or are paused come first, then those with the largest backlog."""
        failing = self.counts["dead"].number + self.counts["retrying"].number
        return not (failing or self.paused), -failing, -self.backlog.number, self.name


def _seconds(histogram: Mapping[int, int], share: float) -> str:
    return seconds_text(percentile(histogram, share)) if histogram else NOTHING


def _at_least(count: Count) -> str:
    return f"{count.number:,}+" if count.is_cut else f"{count.number:,}"


def _count(each: Mapping[str, Count], name: str) -> Count:
    """Where not all messages of a state were counted, a name without a count may have some."""
    return each.get(name) or Count(is_cut=any(count.is_cut for count in each.values()))

"""The overview in the admin: one page for all installed apps, refreshed by a script; each app registers its section.

What needs attention stands first, and each thing is said once: an alert is shown in the line that reports the same condition.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from typing import Any, ClassVar

from django.contrib import admin
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.loader import render_to_string
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _

from exactly_once.console.admin.database_health import horizon_warnings, pins
from exactly_once.console.admin.html import age, app_name, headline, identifier, state_badge
from exactly_once.console.admin.message_search import BadSearch, read
from exactly_once.console.admin.pages import PageAdmin
from exactly_once.console.admin.sections import (
    Attention,
    Condition,
    Fact,
    Link,
    Reading,
    Section,
    Text,
    count_text,
    listed,
    view_permission,
)
from exactly_once.console.display import ngettext, number, visible
from exactly_once.console.operators.alerts import raised as raised_alerts
from exactly_once.half import Half, visible_halves
from exactly_once.models import Alert, DatabaseHealth, Operation, OperationState, Overview
from exactly_once.sql.now import DatabaseTime
from exactly_once.telemetry.statistics import Counted, percentile
from exactly_once.upkeep.minutes import MINUTE, OTHER, Step

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
_DAY_STEP = timedelta(minutes=10)
_RANGES = {"hour": HOUR, "day": DAY}
_PARTS = ("attention", "states", "figures")
_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_MOST_FAILING = _MOST_ALERTS = 5
_MOST_STOPPED = 3
_MOST_FOUND = 20
_MOST_ALERTS_READ = 500
_LAST = 100
_UNKNOWN = Condition(link=lambda name: listed(Alert))
"""Of an alert whose condition no app registers."""


@admin.register(Overview)
class OverviewAdmin(PageAdmin):
    """Shows the sections of the apps whose messages the user may view."""

    template = "exactly_once/overview.html"

    class Media:
        css: ClassVar[Any] = {"all": ["exactly_once/uplot/uPlot.min.css"]}
        js = ("exactly_once/uplot/uPlot.iife.min.js", "exactly_once/overview.js")

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view
        return [
            path("figures/", view(self.figures_view), name="exactly_once_overview_figures"),
            path("latency/", view(self.latency_view), name="exactly_once_overview_latency"),
            path("search/", view(self.search_view), name="exactly_once_overview_search"),
            *super().get_urls(),
        ]

    def content(self, request: HttpRequest) -> dict[str, Any]:
        urls = {f"{page}_url": self._url(page) for page in ("figures", "latency", "search")}
        return {"title": _("Overview"), **self._parts(request), **urls}

    def latency_view(self, request: HttpRequest) -> HttpResponse:
        """The stages of the messages of each topic."""
        self.require_permission(request)
        found = list(stages([half.section for half in visible_halves(request.user)], self.using))
        content = {"title": _("Latency by topic"), "stages": found, "overview_url": self._url("changelist")}
        return self.respond(request, "exactly_once/latency.html", content)

    def search_view(self, request: HttpRequest) -> HttpResponse:
        """A search in the messages of both halves."""
        self.require_permission(request)
        term, problem = request.GET.get("q", "").strip(), ""
        try:
            read(term)
        except BadSearch as error:
            problem = visible(str(error))
        known = [half for half in visible_halves(request.user) if self.admin_site.is_registered(half.messages)]
        content = {
            "title": _("Search"),
            "term": term,
            "problem": problem,
            "parts": [self._found(request, half, term) for half in known if term and not problem],
            "overview_url": self._url("changelist"),
            "search_url": self._url("search"),
        }
        return self.respond(request, "exactly_once/search.html", content)

    def _found(self, request: HttpRequest, half: Half, term: str) -> dict[str, Any]:
        """The first messages of a half, as their list shows them."""
        page: Any = self.admin_site.get_model_admin(half.messages)
        rows, _is_distinct = page.get_search_results(request, page.get_queryset(request), term)
        found = list(rows.defer(*page.large_columns).order_by(*page.ordering)[: _MOST_FOUND + 1])
        return {
            "app": half.app,
            "rows": [
                (page.own_url(row.pk), page.summary(row), page.badge_of(row), page.age(row), page.error_headline(row))
                for row in found[:_MOST_FOUND]
            ],
            "is_cut": len(found) > _MOST_FOUND,
            "url": listed(half.messages, q=term).url(self.admin_site, request),
        }

    def figures_view(self, request: HttpRequest) -> HttpResponse:
        """The figures for the script: as HTML, and with `charts` the series of the last hour or day."""
        self.require_permission(request)
        found: dict[str, Any] = self._parts(request)
        if duration := _RANGES.get(request.GET.get("charts", "")):
            found["charts"] = [chart for half in visible_halves(request.user) for chart in charts(half, self.using, duration)]
        response = JsonResponse(found)
        response["Cache-Control"] = "no-store"
        return response

    def _url(self, page: str) -> str:
        return reverse(f"{self.admin_site.name}:exactly_once_overview_{page}")

    def _parts(self, request: HttpRequest) -> dict[str, str]:
        """The refreshed parts of the page."""
        view = View(self, request)
        context = {"lines": view.lines(), **view.figures()}
        return {name: render_to_string(f"exactly_once/overview_{name}.html", context, request) for name in _PARTS}


@dataclass(frozen=True, kw_only=True)
class Line:
    """What needs attention, as it is shown; `app` is empty if it is about the database, `rank` is that of the condition."""

    app: str = ""
    text: Text
    url: str
    is_urgent: bool
    rank: int = _LAST
    more: Sequence[tuple[Text, str]] = ()


class View:
    """The figures of the sections whose messages the user may view, read once, with links that the user may follow."""

    def __init__(self, model_admin: OverviewAdmin, request: HttpRequest) -> None:
        self._site, self._request, self._alias = model_admin.admin_site, request, model_admin.using
        self._read = [(half, half.section.read(self._alias)) for half in visible_halves(request.user)]
        self._sees_alerts = request.user.has_perm(view_permission(Alert))

    def _url(self, link: Link | None) -> str:
        return "" if link is None else link.url(self._site, self._request)

    # what needs attention

    def lines(self) -> list[Line]:
        """What needs attention: the urgent lines first; of these what stops all messages before what stops some."""
        alerts = list(raised_alerts(self._alias)[:_MOST_ALERTS_READ]) if self._sees_alerts else []
        found = [line for half, reading in self._read for line in self._of_half(half, reading, alerts)]
        found += [line for half, _reading in self._read for line in self._stopped(half)]
        found += [
            Line(text=text, url=self._url(listed(DatabaseHealth)), is_urgent=True)
            for text in horizon_warnings(pins(self._alias))
        ]
        return sorted(found, key=lambda line: (not line.is_urgent, line.rank))

    def _of_half(self, half: Half, reading: Reading, alerts: Sequence[Any]) -> Iterator[Line]:
        left = [alert for alert in alerts if alert.app == half.app]
        for each in reading.attention:
            of_condition = [alert for alert in left if alert.condition == each.condition]
            same = [alert for alert in of_condition if each.objects is None or alert.object in each.objects]
            left = [alert for alert in left if alert not in same]
            yield self._line(half, each, same)
        for alert in left[:_MOST_ALERTS]:
            text = format_html("{}: {}", identifier(str(alert)), headline(alert.summary))
            is_urgent = False if alert.acknowledged_at else None
            each = Attention(condition=alert.condition, text=text, objects=[alert.object], is_urgent=is_urgent)
            yield self._line(half, each, [alert])
        if (more := len(left) - _MOST_ALERTS) > 0:
            words = ngettext("%(count)s more alert is raised.", "%(count)s more alerts are raised.", more)
            yield Line(app=half.app, text=words, url=self._url(listed(Alert, app=half.app)), is_urgent=True)

    def _line(self, half: Half, each: Attention, alerts: Sequence[Any]) -> Line:
        conditions = half.section.conditions
        condition = conditions.get(each.condition, _UNKNOWN)
        more = [(text, self._url(link)) for text, link in each.more]
        if len(alerts) > 1:
            words = ngettext("%(count)s alert is raised.", "%(count)s alerts are raised.", len(alerts))
            more.append((words, self._url(listed(Alert, app=half.app))))
        elif alerts:
            more.append(self._told(alerts[0]))
        return Line(
            app=half.app,
            text=each.text,
            url=self._url(condition.link(each.objects[0] if each.objects and len(each.objects) == 1 else "")),
            is_urgent=condition.is_urgent if each.is_urgent is None else each.is_urgent,
            rank=[*conditions].index(each.condition) if each.condition in conditions else _LAST,
            more=more,
        )

    def _stopped(self, half: Half) -> Iterator[Line]:
        """The operations that have stopped by themselves lately. Each stays so until an operator continues it."""
        stopped = Operation.objects.using(self._alias).filter(app=half.app, state=OperationState.STOPPED)
        rows = stopped.filter(ended_at__gte=DatabaseTime(-DAY)).order_by("-ended_at")
        if count := rows.count():
            words = ngettext(
                "Within a day, %(count)s operation has stopped by itself.",
                "Within a day, %(count)s operations have stopped by themselves.",
                count,
            )
            may_view, page = view_permission(half.messages), "exactly_once_operation"
            query = {"state": OperationState.STOPPED, "app": half.app}
            shown = [
                (row, Link(page=f"{page}_change", permission=may_view, arguments=[row.pk])) for row in rows[:_MOST_STOPPED]
            ]
            yield Line(
                app=half.app,
                text=words,
                url=self._url(Link(page=f"{page}_changelist", permission=may_view, query=query)),
                is_urgent=True,
                more=[(headline(row.stopped_because), self._url(link)) for row, link in shown],
            )

    def _told(self, alert: Any) -> tuple[Text, str]:
        """Since when an alert is raised, and who has acknowledged it, with its page."""
        words = _("alert raised {}, acknowledged by {}") if alert.acknowledged_at else _("alert raised {}")
        text = format_html(words, age(alert.raised_at, alert.database_now), identifier(alert.acknowledged_by))
        link = Link(page="exactly_once_alert_change", permission=view_permission(Alert), arguments=[alert.pk])
        return text, self._url(link)

    # figures

    def figures(self) -> dict[str, Any]:
        """For the template."""
        facts = [fact for _half, reading in self._read for fact in reading.facts]
        if self._sees_alerts:
            facts.append(Fact(name=_("Raised alerts"), value=number(raised_alerts(self._alias).count()), link=listed(Alert)))
        return {
            "sections": [self._of(half, reading) for half, reading in self._read],
            "facts": [(fact.name, fact.value, self._url(fact.link)) for fact in facts],
        }

    def _of(self, half: Half, reading: Reading) -> dict[str, Any]:
        section, minutes = half.section, half.section.minutes
        is_kept = minutes.is_kept(self._alias)
        hour = minutes.sum(self._alias, HOUR) if is_kept else None
        day = minutes.counts(self._alias, DAY) if is_kept else None
        return {
            "app": half.app,
            "is_kept": is_kept,
            "states": [
                (state_badge(state), count_text(count), self._url(listed(half.messages, state=state)))
                for state, count in reading.counts.items()
            ],
            "numbers": [(label, _sum(hour, names), _sum(day, names)) for label, names in section.numbers],
            "latencies": [
                (label, [_percentile(hour, name, share) for share in _SHARES.values()])
                for name, label in section.latencies.items()
            ],
            "failing_title": section.failing,
            "failing": [
                (subject, failed, self._url(listed(half.messages, q=subject, stuck="any")))
                for subject, failed in minutes.failing(self._alias, HOUR, section.failures, _MOST_FAILING)
            ],
        }


def _sum(counted: Counted | None, names: Sequence[str]) -> int | None:
    return None if counted is None else sum(counted.counts[name] for name in names)


def _percentile(counted: Counted | None, name: str, share: float) -> float | None:
    return None if counted is None else percentile(counted.times.get(name, {}), share)


def charts(half: Half, alias: str, duration: timedelta) -> list[dict[str, Any]]:
    """The charts of a half for the script: the counts of each minute, and the lag. A minute without messages has no lag."""
    section, step = half.section, MINUTE if duration <= HOUR else _DAY_STEP
    lag, lag_title = section.lag
    steps = section.minutes.steps(alias, duration, step, timed=[lag]) if section.minutes.is_kept(alias) else []
    times = [int(each.at.timestamp()) for each in steps]
    return [
        {
            "title": _("%(app)s: messages per minute") % {"app": app_name(half.app)},
            "times": times,
            "series": [
                {"label": str(label), "values": [_rate(each, names, step) for each in steps]}
                for label, names in (section.numbers[index] for index in section.plotted)
            ],
        },
        {
            "title": str(lag_title),
            "times": times,
            "series": [{"label": "p95", "values": [_percentile(each.counted, lag, 0.95) for each in steps]}],
        },
    ]


def _rate(step: Step, names: Sequence[str], length: timedelta) -> float:
    return round(sum(step.counted.counts[name] for name in names) / (length / MINUTE), 2)


def stages(shown: Sequence[Section], alias: str) -> Iterator[dict[str, Any]]:
    """The stages of the messages of each topic in the last hour: those of the outbox, then those of its handlers."""
    found: list[tuple[Any, dict[str, Any]]] = []
    for position, section in enumerate(shown):
        for subject, counted in section.minutes.by_subject(alias, HOUR).items():
            is_handler = section.topic_of is not None and subject != OTHER
            topic = section.topic_of(subject) if section.topic_of and is_handler else subject
            is_last = subject == OTHER or not topic
            for name, label in section.latencies.items():
                if histogram := counted.times.get(name):
                    stage = {
                        "topic": _("others") if subject == OTHER else topic or _("unknown"),
                        "label": label,
                        "handler": subject if is_handler else "",
                        "messages": sum(histogram.values()),
                        "percentiles": [(name, percentile(histogram, share)) for name, share in _SHARES.items()],
                    }
                    found.append(((is_last, topic, position, subject), stage))
    return (stage for _place, stage in sorted(found, key=itemgetter(0)))

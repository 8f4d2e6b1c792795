"""The overview: what each app says about its messages, its processes and the last hour.

Each installed app registers one half when Django starts, so the console knows neither app. A half only reads figures that cost
little: counts up to a limit, and the statistics of each minute that the processes write (`operators.minutes`). A figure that
cannot be had is shown as unknown, never as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from operator import itemgetter
from typing import Any

from django.contrib.admin import AdminSite
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.functional import Promise
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.display import Tone, age, badge, headline, identifier
from exactly_once.operators.alert_table import raised as raised_alerts
from exactly_once.operators.minutes import MINUTE, OTHER, Minutes, Step
from exactly_once.plurals import ngettext
from exactly_once.sql.counts import Count
from exactly_once.sql.labels import label_of
from exactly_once.telemetry.statistics import Counted, percentile

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
_DAY_STEP = timedelta(minutes=10)
_SHARES = (0.5, 0.95, 0.99)
_MOST_FAILING = 5
_MOST_ALERTS = 5
_ONE_DIGIT = 10

Text = str | SafeString | Promise


@dataclass(frozen=True, kw_only=True)
class Link:
    """A page of the admin, if the user may view it.

    Attributes:
        page: the name of its URL, without the site's namespace.
        permission: what the user needs for it.
        arguments: of its URL.
        query: its query string.
    """

    page: str
    permission: str
    arguments: Sequence[Any] = ()
    query: Mapping[str, str] = field(default_factory=dict)

    def url(self, site: AdminSite, request: HttpRequest) -> str:
        """ "" if the page does not exist or the user may not view it."""
        if not request.user.has_perm(self.permission):
            return ""
        try:
            address = reverse(f"{site.name}:{self.page}", args=self.arguments)
        except NoReverseMatch:
            return ""
        return f"{address}?{urlencode(self.query)}" if self.query else address


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Something that needs a person."""

    text: Text
    link: Link | None = None


@dataclass(frozen=True, kw_only=True)
class StateCount:
    """The number of messages in one state."""

    label: Text
    tone: Tone
    count: Count
    link: Link

    @property
    def badge(self) -> SafeString:
        return badge(str(self.label), self.tone)


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One line of the overview: a name and its value."""

    name: Text
    value: Text
    link: Link | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How the statistics of an app are shown.

    Attributes:
        minutes: its statistics.
        numbers: its counts: a label and the names whose sum it shows.
        plotted: the labels of `numbers` that are drawn.
        latencies: its histograms by name, with their labels.
        lag: the name of the histogram whose 95th percentile is drawn, and the title of that chart.
        failures: the counts that are failures.
        failing: the heading of the subjects with the most failures, and the link of one of them.
        topic_of: the topic of a subject; "" if it is unknown. None: a subject is a topic.
    """

    minutes: Minutes
    numbers: Sequence[tuple[Text, Sequence[str]]]
    plotted: Sequence[int]
    latencies: Mapping[str, Text]
    lag: tuple[str, Text]
    failures: Sequence[str]
    failing: Text
    link_of: Callable[[str], Link]
    topic_of: Callable[[str], str] | None = None


@dataclass(frozen=True, kw_only=True)
class Half:
    """What one app shows.

    Attributes:
        app: its package.
        read: reads the present figures from the database of this alias.
    """

    app: str
    title: Text
    measured: Measured
    read: Callable[[str], Reading]

    @property
    def permission(self) -> str:
        return f"{label_of(self.app)}.view_overview"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What an app reads for one view of the page.

    Attributes:
        facts: further figures, for example the oldest message that is not settled.
        attention: what needs a person.
    """

    states: Sequence[StateCount]
    facts: Sequence[Fact]
    attention: Sequence[Attention]


_halves: dict[str, Half] = {}


def register(half: Half) -> None:
    _halves[half.app] = half


def halves(request: HttpRequest) -> list[Half]:
    """The halves that the user may view, the outbox first."""
    return [_halves[app] for app in sorted(_halves, reverse=True) if request.user.has_perm(_halves[app].permission)]


# --------------------------------------------------------------------------------------------------------------- in words


def count_text(count: Count | None) -> str:
    if count is None:
        return gettext("unknown")
    number = f"{count.number:,}"
    if count.is_estimate:
        return gettext("about %(number)s") % {"number": number}
    return gettext("more than %(number)s") % {"number": number} if count.is_cut else number


def seconds_text(seconds: float | None) -> str:
    """A latency, in two significant digits; a percentile has no more."""
    if seconds is None:
        return gettext("unknown")
    for factor, unit in ((1 / 3600, "h"), (1 / 60, "min"), (1.0, "s")):
        if seconds * factor >= 1:
            return f"{_rounded(seconds * factor)} {unit}"
    return f"{_rounded(seconds * 1000)} ms"


def bytes_text(size: int | None) -> str:
    if size is None:
        return gettext("unknown")
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if size >= 1000**power:
            return f"{size / 1000**power:.1f} {unit}"
    return f"{size} B"


def _rounded(number: float) -> str:
    return f"{number:.1f}" if number < _ONE_DIGIT else f"{number:.0f}"


# ------------------------------------------------------------------------------------------------------------- for a page


def shown(half: Half, alias: str, site: AdminSite, request: HttpRequest) -> dict[str, Any]:
    """The figures of a half for the template, with links that the user may follow."""
    reading, measured = half.read(alias), half.measured
    alerts = _alerts(half.app, alias) if request.user.has_perm("exactly_once.view_alert") else _NO_ALERTS
    is_kept = measured.minutes.is_kept(alias)
    hour = measured.minutes.sum(alias, HOUR) if is_kept else None
    day = measured.minutes.counts(alias, DAY) if is_kept else None

    def address(link: Link | None) -> str:
        return "" if link is None else link.url(site, request)

    return {
        "app": half.app,
        "title": half.title,
        "is_kept": is_kept,
        "attention": [(each.text, address(each.link)) for each in (*alerts.attention, *reading.attention)],
        "states": [(each.badge, count_text(each.count), address(each.link)) for each in reading.states],
        "facts": [(each.name, each.value, address(each.link)) for each in (*reading.facts, *alerts.facts)],
        "numbers": [(label, _number(hour, names), _number(day, names)) for label, names in measured.numbers],
        "latencies": [
            (label, [seconds_text(_percentile(hour, name, share)) for share in _SHARES])
            for name, label in measured.latencies.items()
        ],
        "failing_title": measured.failing,
        "failing": [
            (
                gettext("others") if each.subject == OTHER else identifier(each.subject),
                f"{each.failed:,}",
                "" if each.subject == OTHER else address(measured.link_of(each.subject)),
            )
            for each in measured.minutes.failing(alias, HOUR, measured.failures, _MOST_FAILING)
        ],
    }


@dataclass(frozen=True, kw_only=True)
class _Alerts:
    attention: Sequence[Attention] = ()
    facts: Sequence[Fact] = ()


_NO_ALERTS = _Alerts()


def _alerts(app: str, alias: str) -> _Alerts:
    """The raised alerts of an app: the latest by name, and their number."""
    raised = raised_alerts(alias).filter(app=app)
    number, permission = raised.count(), "exactly_once.view_alert"
    words = gettext("Alert {} was raised {}: {}")
    attention = [
        Attention(
            text=format_html(words, identifier(str(alert)), age(alert.raised_at, alert.database_now), headline(alert.summary)),
            link=Link(page="exactly_once_alert_change", permission=permission, arguments=[alert.pk]),
        )
        for alert in raised[:_MOST_ALERTS]
    ]
    listed = Link(page="exactly_once_alert_changelist", permission=permission, query={"app": app})
    if number > _MOST_ALERTS:
        more = ngettext("%(count)s more alert is raised.", "%(count)s more alerts are raised.", number - _MOST_ALERTS)
        attention.append(Attention(text=more, link=listed))
    return _Alerts(attention=attention, facts=[Fact(name=_("Raised alerts"), value=f"{number:,}", link=listed)])


def _number(counted: Counted | None, names: Sequence[str]) -> str:
    return gettext("unknown") if counted is None else f"{sum(counted.counts[name] for name in names):,}"


def _percentile(counted: Counted | None, name: str, share: float) -> float | None:
    return None if counted is None else percentile(counted.times.get(name, {}), share)


def charts(half: Half, alias: str, duration: timedelta) -> list[dict[str, Any]]:
    """The charts of a half for the script: the counts of each minute, and the lag. A minute without messages has no lag."""
    measured = half.measured
    step = MINUTE if duration <= HOUR else _DAY_STEP
    lag, lag_title = measured.lag
    steps = measured.minutes.steps(alias, duration, step, timed=[lag]) if measured.minutes.is_kept(alias) else []
    return [
        {
            "title": str(_("Messages per minute")),
            "times": _times(steps),
            "series": [
                {"label": str(label), "values": [_rate(each, names, step) for each in steps]}
                for label, names in (measured.numbers[index] for index in measured.plotted)
            ],
        },
        {
            "title": str(lag_title),
            "times": _times(steps),
            "series": [{"label": "p95", "values": [_percentile(each.counted, lag, 0.95) for each in steps]}],
        },
    ]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the messages of one topic, as it is shown; in the inbox by handler."""

    topic: Text
    label: Text
    handler: Text
    messages: str
    p50: str
    p95: str
    p99: str


def stages(of: Sequence[Half], alias: str) -> list[Stage]:
    """The stages of the messages of each topic in the last hour: those of the outbox, then those of its handlers."""
    found = []
    for position, half in enumerate(of):
        measured = half.measured
        for subject, counted in measured.minutes.by_subject(alias, HOUR).items():
            topic = subject if measured.topic_of is None else measured.topic_of(subject)
            is_last = subject == OTHER or not topic
            for name, label in measured.latencies.items():
                if histogram := counted.times.get(name):
                    p50, p95, p99 = (seconds_text(percentile(histogram, share)) for share in _SHARES)
                    stage = Stage(
                        topic=gettext("others") if subject == OTHER else identifier(topic) if topic else gettext("unknown"),
                        label=label,
                        handler="" if measured.topic_of is None or subject == OTHER else identifier(subject),
                        messages=f"{sum(histogram.values()):,}",
                        p50=p50,
                        p95=p95,
                        p99=p99,
                    )
                    found.append(((is_last, topic, position, subject), stage))
    return [stage for _place, stage in sorted(found, key=itemgetter(0))]


def _times(steps: Sequence[Step]) -> list[int]:
    return [int(step.at.timestamp()) for step in steps]


def _rate(step: Step, names: Sequence[str], length: timedelta) -> float:
    return round(sum(step.counted.counts[name] for name in names) / (length / MINUTE), 2)

"""What each app shows on the pages about both: the overview, topics and handlers, what runs now.

Each half has one section, so these pages know neither. A section only reads figures that cost little: counts up to a limit,
and the statistics of each minute (`upkeep.minutes`). An unknown figure is shown as unknown, never as 0.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.contrib.admin import AdminSite
from django.db.models import Model
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.functional import Promise
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext

from exactly_once.console.admin.html import identifier
from exactly_once.console.display import duration, number, visible
from exactly_once.console.operators.clock_ahead import Dated, ahead
from exactly_once.console.operators.failure_groups import FailureGroups
from exactly_once.sql.counts import Count
from exactly_once.upkeep.heartbeat_table import is_ahead, lost
from exactly_once.upkeep.minutes import LATELY, Minutes

_MOST_GROUPS = 3
_MOST_NAMED = 5

Text = str | SafeString | Promise


@dataclass(frozen=True, kw_only=True)
class Link:
    """A page of the admin, if the user may view it.

    Attributes:
        title: of the page.
        page: the name of its URL, without the site's namespace.
        permission: what the user needs for it.
        arguments: of its URL.
        query: its query string.
    """

    title: Text = ""
    page: str
    permission: str
    arguments: Sequence[Any] = ()
    query: Mapping[str, str] = field(default_factory=dict)

    def url(self, site: AdminSite, request: HttpRequest) -> str:
        """ "" if the page does not exist or the user may not view it."""
        if not request.user.has_perm(self.permission):
            return ""
        try:
            return reverse(f"{site.name}:{self.page}", args=self.arguments, query=self.query)
        except NoReverseMatch:
            return ""


def view_permission(model: type[Model]) -> str:
    return f"{model._meta.app_label}.view_{model._meta.model_name}"


def listed(model: type[Model], **query: str) -> Link:
    """The list of a model, filtered by what is given and not empty."""
    return Link(
        title=capfirst(model._meta.verbose_name_plural) or "",
        page=f"{model._meta.app_label}_{model._meta.model_name}_changelist",
        permission=view_permission(model),
        query={name: value for name, value in query.items() if value},
    )


def failing_dead(app: str, groups: FailureGroups, alias: str) -> list[tuple[Text, Link]]:
    """The failure groups of an app with the most dead messages, with their numbers, for `Attention.more`."""
    return [
        (
            format_html("{}: {} {}", number(dead), identifier(error_class), identifier(place) if place else ""),
            Link(
                page="exactly_once_failurenote_group",
                permission=view_permission(groups.model),
                query={"app": app, "class": error_class, "place": place},
            ),
        )
        for error_class, place, dead in groups.most_dead(alias, _MOST_GROUPS)
    ]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A condition that lines of the overview and alerts report, under the same name.

    Attributes:
        link: the page where an operator acts on it, by its object: a topic, a handler, or "".
        is_urgent: it costs time or needs a person. What operators have done themselves is not urgent.
    """

    link: Callable[[str], Link]
    is_urgent: bool = True


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A line of the overview.

    Attributes:
        condition: the name of its condition.
        objects: what it is about; None: every object. The alerts of this condition and these objects are shown in this line.
        more: further links, each with its text.
        is_urgent: None: as its condition says.
    """

    condition: str
    text: Text
    objects: Sequence[str] | None = ("",)
    more: Sequence[tuple[Text, Link]] = ()
    is_urgent: bool | None = None


def clock_was_ahead(alias: str, kinds: Sequence[Dated]) -> Iterator[Attention]:
    """A line for the rows of each kind that wait because the database's clock was ahead; its object is their state or table."""
    for found in ahead(alias, kinds):
        words = gettext("%(problem)s exactly_once_status has the statement that makes them due.")
        yield Attention(condition="clock_ahead", objects=[found.state or found.table], text=words % {"problem": found})


def silent(rows: Iterable[Any], one: Text, several: Text) -> Iterator[Attention]:
    """A line for the processes that are `lost`. The sentences have a place for their names, and one for how long.

    Another line is about those whose last heartbeat is ahead of the database's clock.
    """
    found = lost(rows)
    ahead_of_clock = [str(process) for process in found if is_ahead(process)]
    if behind := [process for process in found if not is_ahead(process)]:
        names, longest = [str(process) for process in behind], behind[0].database_now - behind[0].beat_at
        text = format_html(str(one if len(behind) == 1 else several), named(names), duration(longest))
        yield Attention(condition="silent", objects=names, text=text)
    if ahead_of_clock:
        words = gettext("No heartbeat has come from {} since the database's clock was ahead: killed, or frozen.")
        yield Attention(condition="silent", objects=ahead_of_clock, text=format_html(words, named(ahead_of_clock)))


def failing(minutes: Minutes, alias: str, known: Collection[str], succeeded: str, *failed: str) -> Iterator[Attention]:
    """A line for each handler or topic whose attempts fail, except those of which other lines say why: the `known` ones."""
    found = minutes.failing_lately(alias, succeeded, failed)
    words = gettext("{}: {} of {} attempts have failed within {}.")
    for name, counts in ((name, counts) for name, counts in found.items() if name not in known):
        text = format_html(words, identifier(name), *map(number, counts), duration(LATELY))
        yield Attention(condition="failing", objects=[name], text=text)


def waiting(processes: Iterable[Any], one: Text, several: Text) -> Iterator[Attention]:
    """A line for each thing that running processes wait for.

    Args:
        one, several: the sentence about a process, and about several; with places for their names and what they wait for.
    """
    names: dict[str, list[str]] = {}
    for process in processes:
        for what in process.waits:
            names.setdefault(what, []).append(f"{process.host}:{process.pid}")
    for what, who in names.items():
        text = format_html(str(one if len(who) == 1 else several), named(sorted(who)), visible(what))
        yield Attention(condition="waiting", text=text)


def named(names: Sequence[str]) -> SafeString:
    """The first of these names, and how many more there are."""
    first = format_html_join(", ", "{}", ((identifier(name),) for name in names[:_MOST_NAMED]))
    more = len(names) - _MOST_NAMED
    return format_html(gettext("{} and {} more"), first, more) if more > 0 else first


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A figure of the overview: a name and its value."""

    name: Text
    value: Text
    link: Link | None = None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What an app reads for one view of the overview.

    Attributes:
        counts: its messages by state.
        facts: further figures, for example the oldest message that is not settled.
    """

    counts: Mapping[Any, Count]
    facts: Sequence[Fact]
    attention: Sequence[Attention]


@dataclass(frozen=True, kw_only=True)
class Section:
    """What one app shows.

    Attributes:
        conditions: by name, the gravest first.
        read: reads the present figures from the database of this alias.
        minutes: its statistics.
        numbers: its counts: a label and the names whose sum it shows.
        plotted: the indexes of `numbers` that are drawn.
        latencies: its histograms by name, with their labels.
        lag: the name of the histogram whose 95th percentile is drawn, and the title of that chart.
        failures: the counts that are failures.
        failing: the heading of the subjects with the most failures.
        topic_of: the topic of a subject; "" if it is unknown. None: a subject is a topic.
        leased: reads up to a number of runs under leases from a database: handler, message id and the end of the lease.
        kind: "topic" or "handler": the column of its paused names, and the filter of its messages.
        backlog: the states of messages that wait for their turn, and are due.
        traffic: the messages by state and topic or handler, of the states in `backlog`, "retrying" and "dead".
        names: the topics or handlers that are known otherwise, up to a number.
        paused: the model of the paused ones.
        depths: the number of messages in the queues of each, as far as it is known. Takes the database.
        remarks: what is wrong with each now. Takes the database.
    """

    conditions: Mapping[str, Condition]
    read: Callable[[str], Reading]
    minutes: Minutes
    numbers: Sequence[tuple[Text, Sequence[str]]]
    plotted: Sequence[int]
    latencies: Mapping[str, Text]
    lag: tuple[str, Text]
    failures: Sequence[str]
    failing: Text
    topic_of: Callable[[str], str] | None = None
    leased: Callable[[str, int], Sequence[tuple[str, str, datetime | None]]] = lambda alias, most: ()
    kind: str
    backlog: Sequence[str]
    traffic: Callable[[str], Mapping[str, Mapping[str, Count]]]
    names: Callable[[str, int], Sequence[str]]
    paused: Any
    depths: Callable[[str], Mapping[str, int]] = lambda alias: {}
    remarks: Callable[[str], Mapping[str, Text]] = lambda alias: {}


# --------------------------------------------------------------------------------------------------------------- in words


def count_text(count: Count) -> str:
    counted = number(count.number)
    if count.is_estimate:
        return gettext("about %(number)s") % {"number": counted}
    return gettext("more than %(number)s") % {"number": counted} if count.is_cut else counted

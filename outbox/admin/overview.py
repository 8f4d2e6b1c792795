"""The outbox's half of the overview."""

from __future__ import annotations

from collections.abc import Iterator

from django.contrib import admin
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.overview import OverviewAdmin
from exactly_once.admin.sections import (
    Attention,
    Fact,
    Half,
    Link,
    Measured,
    Reading,
    StateCount,
    bytes_text,
    count_text,
    register,
)
from exactly_once.display import duration, identifier
from exactly_once.operators.minutes import Minutes, database_time
from exactly_once.sql.counts import Count
from outbox.admin.deciding import DecidingAdmin
from outbox.admin.health import health_link, health_warnings, size_of_tables
from outbox.conf import outbox_options
from outbox.models import Overview, PausedTopic
from outbox.states import State
from outbox.store import figures, heartbeats

_APP = Overview._meta.app_label
_VIEW = f"{_APP}.view_outboxmessage"
_MESSAGES = f"{_APP}_outboxmessage_changelist"
_RELAYS = Link(page="exactly_once_process_changelist", permission="exactly_once.view_process", query={"app": "outbox"})
_PAUSED = Link(page=f"{_APP}_pausedtopic_changelist", permission=f"{_APP}.view_pausedtopic")
_MOST_NAMED = 5


@admin.register(Overview)
class OutboxOverviewAdmin(OverviewAdmin):
    """The page of all halves."""


def _of_state(state: State) -> Link:
    return Link(page=_MESSAGES, permission=_VIEW, query={"state": state})


def _of_topic(topic: str) -> Link:
    return Link(page=_MESSAGES, permission=_VIEW, query={"q": topic, "stuck": "any"})


def _read(alias: str) -> Reading:
    counts = figures.counts(alias)
    processes = list(heartbeats.relays.rows(alias))
    alive = [process for process in processes if not process.silent]
    now, due = database_time(alias), figures.oldest_due(alias, counts)
    overdue = None if due is None else now - due
    size = size_of_tables(alias)

    def attention() -> Iterator[Attention]:
        if not alive:
            yield Attention(text=_("No relay is running: no message is published."), link=_RELAYS)
        for process in alive:
            if process.waits_for:
                words = gettext("Relay %(process)s waits for %(what)s.")
                text = words % {"process": f"{process.host}:{process.pid}", "what": process.waits_for}
                yield Attention(text=text, link=_RELAYS)
        if overdue is not None and overdue > outbox_options().STUCK_AFTER:
            words = gettext("A message has been due for %(duration)s and is not published.")
            link = Link(page=_MESSAGES, permission=_VIEW, query={"stuck": "overdue"})
            yield Attention(text=words % {"duration": duration(overdue)}, link=link)
        yield from _counted(counts[State.DEAD], State.DEAD)
        yield from _counted(counts[State.STUCK], State.STUCK)
        for topic in figures.paused_topics(alias, _MOST_NAMED):
            yield Attention(
                text=format_html(
                    gettext("Topic {} has been paused for {} by {}."),
                    identifier(topic.topic),
                    duration(now - topic.paused_at),
                    topic.paused_by or gettext("the circuit breaker"),
                ),
                link=_PAUSED,
            )
        yield from health_warnings(alias)

    tones = DecidingAdmin.tones
    return Reading(
        states=[
            StateCount(label=state.label, tone=tones[state], count=counts[state], link=_of_state(state)) for state in State
        ],
        facts=[
            Fact(name=_("Longest overdue message"), value=_("none is due") if overdue is None else duration(overdue)),
            Fact(name=_("Relays running"), value=str(len(alive)), link=_RELAYS),
            Fact(
                name=_("Published per second"),
                value=f"{sum(process.rate for process in alive):,.1f}" if alive else _("unknown"),
                link=_RELAYS,
            ),
            Fact(name=_("Paused topics"), value=str(PausedTopic.objects.using(alias).count()), link=_PAUSED),
            Fact(name=_("Size of the tables"), value=bytes_text(size), link=health_link()),
        ],
        attention=list(attention()),
    )


def _counted(count: Count, state: State) -> Iterator[Attention]:
    if not count.number:
        return
    if state is State.DEAD:
        words = ngettext("%(count)s message is dead.", "%(count)s messages are dead.", count.number)
    else:
        words = ngettext("%(count)s prepared message is stuck.", "%(count)s prepared messages are stuck.", count.number)
    yield Attention(text=words % {"count": count_text(count)}, link=_of_state(state))


register(
    Half(
        app="outbox",
        title=_("Outbox"),
        measured=Measured(
            minutes=Minutes("outbox"),
            numbers=[
                (_("published"), ["published"]),
                (_("failed attempts"), ["retried", "dead"]),
                (_("dead"), ["dead"]),
                (_("expired"), ["expired"]),
            ],
            plotted=[0, 1],
            latencies={"to_broker": _("Due → confirmed by the broker")},
            lag=("to_broker", _("Due → confirmed, seconds")),
            failures=["retried", "dead"],
            failing=_("Failing topics, last hour"),
            link_of=_of_topic,
        ),
        read=_read,
    )
)

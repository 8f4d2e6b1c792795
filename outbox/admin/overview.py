"""What the outbox shows on the pages about both halves."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin import sections
from exactly_once.console.admin.html import headline, identifier
from exactly_once.console.display import duration, number, visible
from exactly_once.models import Busy, Process
from exactly_once.sql.counts import Count
from exactly_once.upkeep.minutes import database_time
from outbox.conf import outbox_options
from outbox.models import OutboxMessage, PausedTopic, PendingCallback
from outbox.operators import conditions, figures
from outbox.operators.changes import groups
from outbox.operators.relays import hanging
from outbox.relay.heartbeat import relays
from outbox.states import STOPPED, State, TopicState
from outbox.store import selecting

_MOST_NAMED = 5
_BACKLOG = (State.READY, State.SCHEDULED, State.WAITING, State.PAUSED)
"""Scheduled messages belong to it once they are due."""


def _read(alias: str) -> sections.Reading:
    counts, now = figures.counts(alias), database_time(alias)
    rows = list(relays.rows(alias))
    alive = [process for process in rows if not process.silent]
    due = figures.oldest_due(alias, counts)
    overdue = None if due is None else now - due
    rate = number(sum(process.rate for process in alive), 1) if alive else _("unknown")
    processes = sections.listed(Process, app="outbox")
    paused = PausedTopic.objects.using(alias).exclude(mode=TopicState.LIMITED).count()
    return sections.Reading(
        counts=counts,
        facts=[
            sections.Fact(name=_("Longest overdue message"), value=_("none is due") if overdue is None else duration(overdue)),
            sections.Fact(name=_("Relays running"), value=str(len(alive)), link=processes),
            sections.Fact(name=_("Published per second"), value=rate, link=processes),
            sections.Fact(name=_("Paused topics"), value=str(paused), link=sections.listed(PausedTopic)),
        ],
        attention=list(_attention(alias, counts, rows, overdue, now)),
    )


def _attention(
    alias: str, counts: Mapping[State, Count], processes: Sequence[Any], overdue: timedelta | None, now: datetime
) -> Iterator[sections.Attention]:
    alive = [process for process in processes if not process.silent]
    if not alive:
        yield sections.Attention(condition="no_relay", text=_("No relay is running: no message is published."))
    yield from sections.waiting(alive, _("Relay {} waits for {}."), _("Relays {} wait for {}."))
    yield from sections.clock_was_ahead(alias, figures.DATED)
    yield from sections.silent(
        processes,
        _("Relay {} has sent no heartbeat for {}: it was killed, or is frozen."),
        _("Relays {} have sent no heartbeat, the first for {}: they were killed, or are frozen."),
    )
    for name, one in hanging(alias).items():
        line = format_html(
            gettext("{} runs for {} in {}."), identifier(name), duration(one.lasts), sections.named(one.processes)
        )
        yield sections.Attention(condition="hanging", objects=[name], text=line)
    paused = PausedTopic.objects.using(alias).filter(mode__in=STOPPED).order_by("paused_at")[:_MOST_NAMED]
    unroutable = conditions.unroutable(alias)
    for name, why in unroutable.items():
        line = format_html(gettext("Messages of {} cannot be delivered, and wait: {}"), identifier(name), headline(why))
        yield sections.Attention(condition="unroutable", objects=[name], text=line)
    known = {*unroutable, *(topic.topic for topic in paused)}
    yield from sections.failing(conditions.MINUTES, alias, known, "published", "retried", "dead")
    if overdue is not None and overdue > outbox_options().STUCK_AFTER:
        words = gettext("A message has been due for %(duration)s and is not published.")
        yield sections.Attention(condition="lag", text=words % {"duration": duration(overdue)})
    if dead := counts[State.DEAD].number:
        words = ngettext("%(count)s message is dead.", "%(count)s messages are dead.", dead)
        text = words % {"count": sections.count_text(counts[State.DEAD])}
        yield sections.Attention(condition="dead", text=text, more=sections.failing_dead("outbox", groups, alias))
    if stuck := counts[State.STUCK].number:
        words = ngettext("%(count)s prepared message is stuck.", "%(count)s prepared messages are stuck.", stuck)
        yield sections.Attention(condition="stuck_prepared", text=words % {"count": sections.count_text(counts[State.STUCK])})
    for topic in paused:
        if not topic.paused_by and topic.topic in unroutable:
            continue
        words = gettext("Topic {} has been paused for {} by {}.")
        by = visible(topic.paused_by) or gettext("the circuit breaker")
        text = format_html(words, identifier(topic.topic), duration(now - topic.paused_at), by)
        is_urgent = not topic.paused_by
        yield sections.Attention(condition="topic_paused", objects=[topic.topic], text=text, is_urgent=is_urgent)


def _waiting_for_the_clock(name: str) -> sections.Link:
    """By the table of the rows, or the state of messages."""
    for model in (PendingCallback, PausedTopic):
        if name == model._meta.db_table:
            return sections.listed(model)
    return sections.listed(OutboxMessage, state=name)


SECTION = sections.Section(
    conditions={
        "no_relay": sections.Condition(link=lambda name: sections.listed(Process, app="outbox")),
        "waiting": sections.Condition(link=lambda name: sections.listed(Process, app="outbox")),
        "clock_ahead": sections.Condition(link=_waiting_for_the_clock),
        "unroutable": sections.Condition(link=lambda name: sections.listed(OutboxMessage, topic=name)),
        "silent": sections.Condition(link=lambda name: sections.listed(Process, app="outbox")),
        "hanging": sections.Condition(link=lambda name: sections.listed(Busy)),
        "failing": sections.Condition(link=lambda name: sections.listed(OutboxMessage, topic=name, stuck="any")),
        "lag": sections.Condition(link=lambda name: sections.listed(OutboxMessage, stuck="overdue")),
        "dead": sections.Condition(link=lambda name: sections.listed(OutboxMessage, state=State.DEAD)),
        "stuck_prepared": sections.Condition(link=lambda name: sections.listed(OutboxMessage, state=State.STUCK)),
        "topic_paused": sections.Condition(link=lambda name: sections.listed(PausedTopic), is_urgent=False),
    },
    read=_read,
    minutes=conditions.MINUTES,
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
    kind="topic",
    backlog=_BACKLOG,
    traffic=partial(figures.counts_by_topic, states=(*_BACKLOG, State.RETRYING, State.DEAD)),
    names=selecting.topics,
    paused=PausedTopic,
    remarks=lambda alias: dict.fromkeys(conditions.unroutable(alias), gettext("no queue takes its messages")),
)

"""What the outbox shows on the pages about both halves."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.sections import (
    Attention,
    Condition,
    Fact,
    OldestRow,
    Reading,
    Section,
    Traffic,
    count_text,
    failing_dead,
    listed,
    register,
    waiting,
)
from exactly_once.display import duration, identifier, number, visible
from exactly_once.models import Process
from exactly_once.operators.minutes import Minutes, database_time
from exactly_once.sql.counts import Count
from outbox.conf import outbox_options
from outbox.models import OutboxMessage, PausedTopic
from outbox.operators import figures
from outbox.operators.operations import groups
from outbox.states import State
from outbox.store import operating
from outbox.store.heartbeats import relays

_MOST_NAMED = 5
_BACKLOG = (State.READY, State.WAITING, State.PAUSED)


def _read(alias: str) -> Reading:
    counts, now = figures.counts(alias), database_time(alias)
    alive = [process for process in relays.rows(alias) if not process.silent]
    due = figures.oldest_due(alias, counts)
    overdue = None if due is None else now - due
    rate = number(sum(process.rate for process in alive), 1) if alive else _("unknown")
    processes, paused = listed(Process, app="outbox"), PausedTopic.objects.using(alias).count()
    return Reading(
        counts=counts,
        facts=[
            Fact(name=_("Longest overdue message"), value=_("none is due") if overdue is None else duration(overdue)),
            Fact(name=_("Relays running"), value=str(len(alive)), link=processes),
            Fact(name=_("Published per second"), value=rate, link=processes),
            Fact(name=_("Paused topics"), value=str(paused), link=listed(PausedTopic)),
        ],
        attention=list(_attention(alias, counts, alive, overdue, now)),
    )


def _attention(
    alias: str, counts: Mapping[State, Count], alive: Sequence[Any], overdue: timedelta | None, now: datetime
) -> Iterator[Attention]:
    if not alive:
        yield Attention(condition="no_relay", text=_("No relay is running: no message is published."))
    yield from waiting(alive, _("Relay {} waits for {}."), _("Relays {} wait for {}."))
    if overdue is not None and overdue > outbox_options().STUCK_AFTER:
        words = gettext("A message has been due for %(duration)s and is not published.")
        yield Attention(condition="lag", text=words % {"duration": duration(overdue)})
    if dead := counts[State.DEAD].number:
        words = ngettext("%(count)s message is dead.", "%(count)s messages are dead.", dead)
        text = words % {"count": count_text(counts[State.DEAD])}
        yield Attention(condition="dead", text=text, more=failing_dead("outbox", groups, alias))
    if stuck := counts[State.STUCK].number:
        words = ngettext("%(count)s prepared message is stuck.", "%(count)s prepared messages are stuck.", stuck)
        yield Attention(condition="stuck_prepared", text=words % {"count": count_text(counts[State.STUCK])})
    for topic in figures.paused_topics(alias, _MOST_NAMED):
        words = gettext("Topic {} has been paused for {} by {}.")
        by = visible(topic.paused_by) or gettext("the circuit breaker")
        text = format_html(words, identifier(topic.topic), duration(now - topic.paused_at), by)
        is_urgent = not topic.paused_by
        yield Attention(condition="topic_paused", objects=[topic.topic], text=text, is_urgent=is_urgent)


def _oldest(alias: str) -> list[OldestRow]:
    options = outbox_options()
    return [
        OldestRow(name=_("History"), at=figures.oldest_settled(alias), kept=options.keeps),
        OldestRow(name=_("Trail"), at=figures.oldest_entry(alias), kept=options.TRAIL_RETENTION),
    ]


register(
    Section(
        app="outbox",
        title=_("Outbox"),
        model=OutboxMessage,
        conditions={
            "no_relay": Condition(link=lambda name: listed(Process, app="outbox")),
            "waiting": Condition(link=lambda name: listed(Process, app="outbox")),
            "lag": Condition(link=lambda name: listed(OutboxMessage, stuck="overdue")),
            "dead": Condition(link=lambda name: listed(OutboxMessage, state=State.DEAD)),
            "stuck_prepared": Condition(link=lambda name: listed(OutboxMessage, state=State.STUCK)),
            "topic_paused": Condition(link=lambda name: listed(PausedTopic), is_urgent=False),
        },
        read=_read,
        oldest=_oldest,
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
        traffic=Traffic(
            kind="topic",
            title=_("Topics"),
            backlog=_BACKLOG,
            counts=partial(figures.counts_by_topic, states=(*_BACKLOG, State.RETRYING, State.DEAD)),
            names=operating.topics,
            paused=PausedTopic,
        ),
    )
)

"""What the inbox shows on the pages about both halves."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any

from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin import sections
from exactly_once.console.admin.html import identifier
from exactly_once.console.admin.sections import Attention, Condition, Fact, Link, Text, listed, named
from exactly_once.console.display import duration, number, visible
from exactly_once.console.operators.alerts import Hanging
from exactly_once.models import Busy, Process, TopicsAndHandlers
from exactly_once.sql.connections import with_table
from exactly_once.sql.counts import Count
from exactly_once.transport.management_api import QueueDepths
from exactly_once.upkeep.minutes import database_time
from exactly_once.wire.formats import CELERY_TOPICS
from inbox.conf import inbox_options
from inbox.consumer.topology import queues_of
from inbox.deaths import SUFFIX
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, PausedHandler
from inbox.operators import accounting
from inbox.operators.accounting import DATED
from inbox.operators.changes import groups
from inbox.operators.conditions import MINUTES, newly_conflicting
from inbox.operators.processes import hanging, queued, unattended, what_to_start
from inbox.states import State
from inbox.store.due import paused_handlers
from inbox.store.handler_rows import consumers
from inbox.store.receipts import handlers_with_topics

_DAY = timedelta(days=1)
_MOST_NAMED = 5
_BY_AGE = "3"
"""The column of the list, as the admin numbers them."""
_BACKLOG = (State.RECEIVED, State.WAITING, State.RUNNING)
_read_depths = cache(QueueDepths)
_OPEN = (State.RECEIVED, State.RETRYING, State.WAITING, State.RUNNING)


def _topic_of(handler: str) -> str:
    """The topics of a handler of this process, or of a Celery task; "" if it is neither."""
    return ", ".join(registry.topics_of(handler)) or (handler if handler.startswith(CELERY_TOPICS) else "")


def _read(alias: str) -> sections.Reading:
    counts, now = accounting.counts(alias), database_time(alias)
    processes = list(consumers.rows(alias))
    alive = [process for process in processes if not process.silent]
    oldest = min((found for state in _OPEN if (found := counts[state].oldest)), default=None)
    paused = PausedHandler.objects.using(alias).count()
    return sections.Reading(
        counts=counts,
        facts=[
            Fact(name=_("Oldest open message"), value=_("none is open") if oldest is None else duration(now - oldest)),
            Fact(name=_("Consumers running"), value=str(len(alive)), link=listed(Process, app="inbox")),
            Fact(name=_("Paused handlers"), value=str(paused), link=listed(PausedHandler)),
        ],
        attention=list(_attention(alias, counts, processes, now)),
    )


def _lasting(one: Hanging) -> Text:
    """How long the runs of a handler have lasted, and where."""
    words = gettext("runs for {} in {} of {} threads of {}")
    return format_html(words, duration(one.lasts), len(one.messages), one.threads, named(one.processes))


def _attention(alias: str, counts: Mapping[State, Count], processes: Sequence[Any], now: datetime) -> Iterator[Attention]:
    if names := unattended(alias):
        words = ngettext(
            "No consumer is running for the handler {}. {}", "No consumer is running for the handlers {}. {}", len(names)
        )
        yield Attention(condition="no_consumer", objects=names, text=format_html(words, named(names), what_to_start()))
    yield from sections.clock_was_ahead(alias, DATED)
    yield from sections.waiting(
        [process for process in processes if not process.silent], _("Consumer {} waits for {}."), _("Consumers {} wait for {}.")
    )
    yield from sections.silent(
        processes,
        _("Consumer {} has sent no heartbeat for {}: it was killed, or is frozen."),
        _("Consumers {} have sent no heartbeat, the first for {}: they were killed, or are frozen."),
    )
    yield from _of_handlers(alias)
    received = counts[State.RECEIVED].oldest
    if received is not None and now - received > inbox_options().STUCK_AFTER:
        words = gettext("A message was received %(duration)s ago and has not been run.")
        yield Attention(condition="lag", objects=None, text=words % {"duration": duration(now - received)})
    if dead := counts[State.DEAD].number:
        words = ngettext("%(count)s message is a dead letter.", "%(count)s messages are dead letters.", dead)
        text = words % {"count": sections.count_text(counts[State.DEAD])}
        yield Attention(condition="dead", text=text, more=sections.failing_dead("inbox", groups, alias))
    for name, conflicting in newly_conflicting(alias, _DAY).items():
        words = ngettext(
            "Within a day, {count} message of {handler} got different content under its biz-id, which was not run.",
            "Within a day, {count} messages of {handler} got different content under their biz-ids, which was not run.",
            conflicting,
        )
        text = format_html(words, count=number(conflicting), handler=identifier(name))
        yield Attention(condition="conflicts", objects=[name], text=text)
    for row in PausedHandler.objects.using(alias).order_by("paused_at")[:_MOST_NAMED]:
        words = gettext("Handler {} has been paused for {} by {}.")
        text = format_html(words, identifier(row.handler), duration(now - row.paused_at), visible(row.paused_by))
        yield Attention(condition="handler_paused", objects=[row.handler], text=text)


def _of_handlers(alias: str) -> Iterator[Attention]:
    """Handlers that hang, that fail, and whose queues are long."""
    for name, one in hanging(alias).items():
        text = format_html("{} {}.", identifier(name), _lasting(one))
        yield Attention(condition="hanging", objects=[name], text=text, is_urgent=one.fills or one.blocks)
    options, paused = inbox_options().alerts, paused_handlers(alias)
    yield from sections.failing(MINUTES, alias, paused, "handled", "failed")
    for name, count in queued(alias).items():
        if count > options.BACKLOG and name not in paused:
            text = format_html(gettext("{} messages wait at the broker for {}."), number(count), identifier(name))
            yield Attention(condition="backlog", objects=[name], text=text)


def _names(alias: str, most: int) -> list[str]:
    known = [handler.name for handler in registry.all() if handler.using == alias and not handler.name.endswith(SUFFIX)]
    return [*known, *(name for name, _topic in handlers_with_topics(alias, most))]


def _depths(alias: str) -> Mapping[str, int]:
    """The messages in the queues of each handler, as consumers read them, and the management API, which knows all queues."""
    options, found = inbox_options(), queued(alias)
    known = _read_depths(options.broker_url, options.MANAGEMENT_URL, options.tls).known() or {}
    queues = {handler.name: [queue.name for queue in queues_of(handler, options)] for handler in registry.all()}
    return found | {name: sum(known.get(queue, 0) for queue in of) for name, of in queues.items() if known.keys() & {*of}}


def _lagging(handler: str) -> Link:
    """Without a handler: all received messages, the oldest first. One that is run now is not overdue, but in this list."""
    if handler:
        return listed(InboxMessage, handler=handler, stuck="overdue")
    return listed(InboxMessage, state=State.RECEIVED, o=_BY_AGE)


def _leased(alias: str, most: int) -> list[tuple[str, str, datetime | None]]:
    if not with_table(InboxMessage, [alias])[0]:
        return []
    running = InboxMessage.objects.using(alias).filter(state=State.RUNNING, next_attempt_at__isnull=False)
    return list(running.order_by("next_attempt_at").values_list("handler", "message_id", "next_attempt_at")[:most])


SECTION = sections.Section(
    conditions={
        "no_consumer": Condition(link=lambda name: listed(Process, app="inbox")),
        "waiting": Condition(link=lambda name: listed(Process, app="inbox")),
        "clock_ahead": Condition(link=lambda name: listed(InboxMessage, state=name)),
        "hanging": Condition(link=lambda name: listed(Busy)),
        "silent": Condition(link=lambda name: listed(Process, app="inbox")),
        "failing": Condition(link=lambda name: listed(InboxMessage, handler=name, stuck="any")),
        "backlog": Condition(link=lambda name: listed(TopicsAndHandlers)),
        "lag": Condition(link=_lagging),
        "dead": Condition(link=lambda name: listed(InboxMessage, state=State.DEAD)),
        "conflicts": Condition(link=lambda name: listed(InboxMessage, handler=name, duplicates="conflicting")),
        "handler_paused": Condition(link=lambda name: listed(PausedHandler), is_urgent=False),
    },
    read=_read,
    minutes=MINUTES,
    numbers=[
        (_("handled"), ["handled"]),
        (_("failed attempts"), ["failed"]),
        (_("deferred by RetryLater"), ["deferred"]),
        (_("dead"), ["dead"]),
        (_("duplicates suppressed"), ["redeliveries", "resends", "replays", "repeats"]),
        (_("of these: redelivered by the broker"), ["redeliveries"]),
        (_("of these: resent by a relay"), ["resends"]),
        (_("of these: replayed by an operator"), ["replays"]),
        (_("of these: published again"), ["repeats"]),
    ],
    plotted=[0, 1, 4],
    latencies={"to_inbox": _("Due → received"), "to_effect": _("Received → effect committed")},
    lag=("to_effect", _("Received → effect, seconds")),
    failures=["failed"],
    failing=_("Failing handlers, last hour"),
    topic_of=_topic_of,
    leased=_leased,
    kind="handler",
    backlog=_BACKLOG,
    traffic=partial(accounting.counts_by_handler, states=(*_BACKLOG, State.RETRYING, State.DEAD)),
    names=_names,
    paused=PausedHandler,
    depths=_depths,
    remarks=lambda alias: {name: _lasting(one) for name, one in hanging(alias).items()},
)

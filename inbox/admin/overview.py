"""The inbox's half of the overview."""

from __future__ import annotations

from collections.abc import Iterator

from django.contrib import admin
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.overview import OverviewAdmin
from exactly_once.admin.sections import (
    DAY,
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
from exactly_once.wire.formats import CELERY_TOPICS
from inbox.admin.health import health_link, health_warnings, size_of_tables
from inbox.admin.messages import InboxMessageAdmin
from inbox.conf import inbox_options
from inbox.consumer.heartbeat import unattended, what_to_start
from inbox.handlers.registry import registry
from inbox.models import Overview, PausedHandler, State
from inbox.store import figures
from inbox.store.alerting import newly_conflicting
from inbox.store.heartbeats import consumers

_APP = Overview._meta.app_label
_VIEW = f"{_APP}.view_inboxmessage"
_MESSAGES = f"{_APP}_inboxmessage_changelist"
_CONSUMERS = Link(page="exactly_once_process_changelist", permission="exactly_once.view_process", query={"app": "inbox"})
_PAUSED = Link(page=f"{_APP}_pausedhandler_changelist", permission=f"{_APP}.view_pausedhandler")
_MOST_NAMED = 5
_OPEN = (State.RECEIVED, State.RETRYING, State.WAITING, State.RUNNING)


@admin.register(Overview)
class InboxOverviewAdmin(OverviewAdmin):
    """The page of all halves."""


def _of_state(state: State) -> Link:
    return Link(page=_MESSAGES, permission=_VIEW, query={"state": state})


def _of_handler(handler: str) -> Link:
    return Link(page=_MESSAGES, permission=_VIEW, query={"q": handler, "stuck": "any"})


def _topic_of(handler: str) -> str:
    """The topic of a handler of this process, or of a Celery task; "" if it is neither."""
    registered = registry.get(handler)
    return registered.topic if registered else handler if handler.startswith(CELERY_TOPICS) else ""


def _read(alias: str) -> Reading:
    counts = figures.counts(alias)
    alive = [process for process in consumers.rows(alias) if not process.silent]
    now = database_time(alias)
    oldest = min((counts[state].oldest or now for state in _OPEN), default=now)
    size = size_of_tables(alias)

    def attention() -> Iterator[Attention]:
        for name in unattended(alias):
            words = gettext("No consumer is running for the handler {}. {}")
            yield Attention(text=format_html(words, identifier(name), what_to_start()), link=_CONSUMERS)
        for process in alive:
            if process.waits_for:
                words = gettext("Consumer %(process)s waits for %(what)s.")
                text = words % {"process": f"{process.host}:{process.pid}", "what": process.waits_for}
                yield Attention(text=text, link=_CONSUMERS)
        for paused in PausedHandler.objects.using(alias).order_by("paused_at")[:_MOST_NAMED]:
            words = gettext("Handler {} has been paused for {} by {}.")
            names = identifier(paused.handler), duration(now - paused.paused_at), paused.paused_by
            yield Attention(text=format_html(words, *names), link=_PAUSED)
        if counts[State.DEAD].number:
            words = ngettext("%(count)s message is a dead letter.", "%(count)s messages are dead letters.", dead.number)
            yield Attention(text=words % {"count": count_text(dead)}, link=_of_state(State.DEAD))
        for name, number in newly_conflicting(alias, DAY).items():
            words = ngettext(
                "Within a day, {count} message of {handler} got different content under its biz-id, which was not run.",
                "Within a day, {count} messages of {handler} got different content under their biz-ids, which was not run.",
                number,
            )
            conflicting = Link(page=_MESSAGES, permission=_VIEW, query={"handler": name, "duplicates": "conflicting"})
            yield Attention(text=format_html(words, count=f"{number:,}", handler=identifier(name)), link=conflicting)
        received = counts[State.RECEIVED].oldest
        if received is not None and now - received > inbox_options().STUCK_AFTER:
            words = gettext("A message was received %(duration)s ago and has not been run.")
            yield Attention(text=words % {"duration": duration(now - received)}, link=_of_state(State.RECEIVED))
        yield from health_warnings(alias)

    dead, tones = counts[State.DEAD], InboxMessageAdmin.tones
    is_any_open = any(counts[state].oldest for state in _OPEN)
    return Reading(
        states=[
            StateCount(label=state.label, tone=tones[state], count=counts[state], link=_of_state(state)) for state in State
        ],
        facts=[
            Fact(name=_("Oldest open message"), value=duration(now - oldest) if is_any_open else _("none is open")),
            Fact(name=_("Consumers running"), value=str(len(alive)), link=_CONSUMERS),
            Fact(name=_("Size of the tables"), value=bytes_text(size), link=health_link()),
        ],
        attention=list(attention()),
    )


register(
    Half(
        app="inbox",
        title=_("Inbox"),
        measured=Measured(
            minutes=Minutes("inbox"),
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
            link_of=_of_handler,
            topic_of=_topic_of,
        ),
        read=_read,
    )
)

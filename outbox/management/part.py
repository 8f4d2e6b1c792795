"""The outbox's part of the commands and health checks for both apps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.cli.parts import Part, iso, process_as_json, processes, state_of
from exactly_once.cli.terminal import BOLD, RED, YELLOW, Line, Table, age, sentence
from exactly_once.plurals import ngettext
from outbox.checkers import checkers
from outbox.conf import outbox_options
from outbox.dead_letters import letters
from outbox.models import TrailEntry
from outbox.operators.callbacks import PendingCalls, pending_calls
from outbox.operators.counts import count_states, topics_unchecked
from outbox.operators.operations import operations
from outbox.states import State
from outbox.store import heartbeats, history, pausing

_STYLES = {State.DEAD: RED, State.STUCK: RED, State.RETRYING: YELLOW, State.WAITING: YELLOW, State.PAUSED: YELLOW}
_COLUMNS = (
    (gettext_lazy("last pass"), lambda relay: age(relay.last_pass_at, relay.database_now)),
    (gettext_lazy("published"), lambda relay: f"{relay.facts['published']:,}"),
    # The present rate of a silent relay is unknown.
    (gettext_lazy("per second"), lambda relay: "-" if relay.silent else f"{relay.rate:,.1f}"),
)


class OutboxPart(Part):
    app, kind = "outbox", "relay"
    letters, store, trail, operations, options = letters, history, TrailEntry, operations, staticmethod(outbox_options)

    def retention(self) -> timedelta:
        return outbox_options().keeps

    def heartbeats(self, alias: str) -> Sequence[Any]:
        return list(heartbeats.relays.rows(alias))

    def status(self, alias: str, *, conflicts: bool) -> dict[str, Any]:
        counts, calls = count_states(alias), pending_calls(alias)
        return {
            "states": counts.states,
            "estimated": sorted(counts.estimated),
            "oldest_waiting": iso(counts.oldest_waiting),
            "callbacks": {
                "pending": calls.pending,
                "failing": calls.failing,
                "unknown": calls.unknown,
                "oldest": iso(calls.oldest),
            },
            "paused_topics": [_topic_as_json(topic) for topic in pausing.paused_topics(alias)],
            "relays": [_as_json(relay) for relay in self.heartbeats(alias)],
        }

    def tables(self, alias: str, rates: Callable[[str, int], str], *, conflicts: bool) -> list[Table]:
        return list(self._tables(alias, rates))

    def _tables(self, alias: str, rates: Callable[[str, int], str]) -> Iterator[Table]:
        counted = count_states(alias)
        states = counted.states
        lines = [Line(["outbox", alias], BOLD)]
        for state, count in states.items():
            about = _("about ") if state in counted.estimated else ""
            style = _STYLES.get(State(state), "") if count else ""
            lines.append(Line([state, f"{about}{count:,}", rates(f"outbox {state}", count)], style))
        yield Table([*lines, Line([_("oldest waiting"), age(counted.oldest_waiting)])])
        calls = pending_calls(alias)
        if calls.pending:
            yield _calls(calls)
        if paused := list(pausing.paused_topics(alias)):
            yield _paused(paused)
        if days := history.days_with_pending_callbacks(alias, history.day_of(alias, outbox_options().keeps) - 1):
            words = _("History of %(dates)s is older than OUTBOX['KEEP_HISTORY'] and stays until its callbacks have returned.")
            yield sentence(words % {"dates": ", ".join(str(history.date_of(day)) for day in days)})
        if states[State.STUCK]:
            yield sentence(_stuck(states[State.STUCK]), RED)
        if unchecked := topics_unchecked(alias, checkers.topics()):
            words = _("No checker is registered for prepared messages of: %(topics)s.")
            yield sentence(words % {"topics": ", ".join(unchecked)}, RED)
        relays = self.heartbeats(alias)
        if relays:
            yield processes(_("relay"), relays, _COLUMNS, _state)
        if all(relay.silent for relay in relays):
            yield sentence(_none_runs(states[State.READY]), RED)


def _calls(calls: PendingCalls) -> Table:
    lines = [
        Line([_("callbacks")], BOLD),
        Line([_("pending"), f"{calls.pending:,}"]),
        Line([_("failing"), f"{calls.failing:,}"], RED if calls.failing else ""),
    ]
    if calls.unknown:
        lines.append(Line([_("unknown to this code"), f"{calls.unknown:,}"]))
    return Table([*lines, Line([_("oldest"), age(calls.oldest)])])


def _paused(topics: list[Any]) -> Table:
    head = Line([_("paused topic"), _("since"), _("messages"), _("why")], BOLD)
    lines = [
        Line([topic.topic, age(topic.paused_at, topic.database_now), f"{topic.messages:,}", _why_paused(topic)])
        for topic in topics
    ]
    return Table([head, *lines], texts=1)


def _why_paused(topic: Any) -> str:
    reason = " ".join(topic.reason.split())
    if topic.is_resuming:
        return _("is being resumed")
    if topic.paused_by:
        return _("by %(user)s") % {"user": f"{topic.paused_by}{reason and f': {reason}'}"}
    return _("the broker refuses it: %(reason)s") % {"reason": reason}


def _state(relay: Any) -> Line:
    is_starting = relay.last_pass_at is None and not (relay.silent or relay.waits_for)
    return Line([_("starting")]) if is_starting else state_of(relay)


def _stuck(count: int) -> str:
    return ngettext(
        "%(count)s prepared message is stuck: no checker knows whether the effect happened. Find out, then run "
        "outbox_resume --checks, or decide in the admin.",
        "%(count)s prepared messages are stuck: no checker knows whether the effect happened. Find out, then run "
        "outbox_resume --checks, or decide in the admin.",
        count,
    )


def _none_runs(ready: int) -> str:
    if not ready:
        return _("No relay is running.")
    return ngettext(
        "No relay is running: %(count)s message is ready.", "No relay is running: %(count)s messages are ready.", ready
    )


def _topic_as_json(topic: Any) -> dict[str, Any]:
    return {
        "topic": topic.topic,
        "messages": topic.messages,
        "since": iso(topic.paused_at),
        "by": topic.paused_by or "circuit breaker",
        "reason": topic.reason,
        "next_try": iso(topic.probe_at) if not topic.is_resuming else None,
        "resuming": topic.is_resuming,
    }


def _as_json(relay: Any) -> dict[str, Any]:
    rate = None if relay.silent else relay.rate
    return process_as_json(relay, last_pass=iso(relay.last_pass_at), published=relay.facts["published"], rate=rate)

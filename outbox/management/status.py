"""The outbox's part of the commands and health checks for both apps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from django.utils.translation import gettext as _

from exactly_once.console.cli.terminal import BOLD, RED, YELLOW, Line, Table, age, sentence
from exactly_once.console.display import ngettext
from exactly_once.half import Check
from exactly_once.sql.days import date_of, last_day
from outbox.callbacks import checkers
from outbox.conf import outbox_options
from outbox.operators.figures import count_states, topics_unchecked
from outbox.states import State, TopicState
from outbox.store import history, paused_topics
from outbox.store.pending_callbacks import PendingCalls, pending_calls

_STYLES = {State.DEAD: RED, State.STUCK: RED, State.RETRYING: YELLOW, State.WAITING: YELLOW, State.PAUSED: YELLOW}


def kinds() -> list[str]:
    return ["relay"]


def checks(alias: str, processes: Sequence[Any]) -> list[Check]:
    return []


def figures(alias: str, *, conflicts: bool) -> dict[str, Any]:
    counts = count_states(alias)
    return {
        "states": counts.states,
        "estimated": sorted(counts.estimated),
        "oldest_waiting": counts.oldest_waiting,
        "callbacks": asdict(pending_calls(alias)),
        "paused_topics": [_topic_as_json(topic) for topic in paused_topics.paused_topics(alias)],
    }


def tables(alias: str, rates: Callable[[str, int], str], *, conflicts: bool) -> Iterator[Table]:
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
    if paused := list(paused_topics.paused_topics(alias)):
        yield _paused(paused)
    if days := history.days_with_pending_callbacks(alias, last_day(alias, outbox_options().keeps)):
        words = _("History of %(dates)s is older than OUTBOX['KEEP_HISTORY'] and stays until its callbacks have returned.")
        yield sentence(words % {"dates": ", ".join(str(date_of(day)) for day in days)})
    if states[State.STUCK]:
        yield sentence(_stuck(states[State.STUCK]), RED)
    if unchecked := topics_unchecked(alias, checkers.topics()):
        words = _("No checker is registered for prepared messages of: %(topics)s.")
        yield sentence(words % {"topics": ", ".join(unchecked)}, RED)


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
    if topic.mode == TopicState.LIMITED:
        return _("its rate in OUTBOX['TOPICS'] limits it")
    if topic.mode == TopicState.RESUMING:
        return _("is being resumed")
    if topic.mode == TopicState.PAUSED:
        return _("by %(user)s") % {"user": f"{topic.paused_by}{reason and f': {reason}'}"}
    return _("the broker refuses it: %(reason)s") % {"reason": reason}


def _stuck(count: int) -> str:
    return ngettext(
        "%(count)s prepared message is stuck: no checker knows whether the effect happened. Find out, then run "
        "outbox_resume --checks, or decide in the admin.",
        "%(count)s prepared messages are stuck: no checker knows whether the effect happened. Find out, then run "
        "outbox_resume --checks, or decide in the admin.",
        count,
    )


def _topic_as_json(topic: Any) -> dict[str, Any]:
    return {
        "topic": topic.topic,
        "messages": topic.messages,
        "since": topic.paused_at,
        "mode": topic.mode,
        "by": topic.paused_by,
        "reason": topic.reason,
        "next_try": topic.probe_at if topic.mode == TopicState.REFUSED else None,
    }

import re
from collections.abc import Sequence
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.cli.status import StatusCommand, iso, process_as_json, processes, state_of
from exactly_once.cli.terminal import age, table
from exactly_once.plurals import ngettext
from outbox.checkers import checkers
from outbox.conf import outbox_options
from outbox.states import State
from outbox.store import heartbeats, history, pausing, pending_callbacks, preparing

_COLUMNS = (
    (_("last pass"), lambda relay: age(relay.last_pass_at, relay.database_now)),
    (_("published"), lambda relay: f"{relay.facts['published']:,}"),
    # The present rate of a silent relay is unknown.
    (_("per second"), lambda relay: "-" if relay.silent else f"{relay.rate:,.1f}"),
)


class Command(StatusCommand):
    help = _(  # type: ignore[assignment] # see TranslatedCommand
        "Show the number of messages in each state, the age of the oldest waiting one, the pending callbacks, the paused "
        "topics, and the running relays."
    )
    app = "outbox"

    def alarming(self) -> Sequence[str]:
        none_runs = gettext("No relay is running.").rstrip(".")
        return r"^(dead|stuck) +[1-9]", rf"  {gettext('silent')}$", rf"^{re.escape(none_runs)}"

    def remarkable(self) -> Sequence[str]:
        waits = gettext("waits for %(what)s") % {"what": ""}
        return r"^(retrying|waiting|paused) +[1-9]", rf"  {re.escape(waits)}"

    def as_json(self, alias: str, options: dict[str, Any]) -> dict[str, Any]:
        counts, calls = history.count_states(alias), pending_callbacks.pending_calls(alias)
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
            "relays": [_as_json(relay) for relay in heartbeats.relays.rows(alias)],
        }

    def drawn(self, alias: str, options: dict[str, Any]) -> str:
        counted = history.count_states(alias)
        states = counted.states
        relays = list(heartbeats.relays.rows(alias))
        about = {state: gettext("about ") if state in counted.estimated else "" for state in states}
        shown = {state: f"{about[state]}{count:,}" for state, count in states.items()}
        lines = [("outbox", alias), *self.with_rates(states, shown), (gettext("oldest waiting"), age(counted.oldest_waiting))]
        drawn = [table(lines)]
        calls = pending_callbacks.pending_calls(alias)
        if calls.pending:
            drawn.append(_calls(calls))
        if paused := list(pausing.paused_topics(alias)):
            drawn.append(_paused(paused))
        if days := history.days_with_pending_callbacks(alias, history.day_of(alias, outbox_options().keeps) - 1):
            drawn.append(_undropped(days))
        if states[State.STUCK]:
            drawn.append(_stuck(states[State.STUCK]))
        if unchecked := preparing.topics_unchecked(alias, checkers.topics()):
            drawn.append(
                gettext("No checker is registered for prepared messages of: %(topics)s.") % {"topics": ", ".join(unchecked)}
            )
        if relays:
            drawn.append(processes(gettext("relay"), relays, _COLUMNS, _state))
        if all(relay.silent for relay in relays):
            drawn.append(_none_runs(states[State.READY]))
        return "\n\n".join(drawn)


def _undropped(days: list[int]) -> str:
    dates = ", ".join(str(history.date_of(day)) for day in days)
    return gettext("History of %(dates)s is older than OUTBOX['KEEP_HISTORY'] and stays until its callbacks have returned.") % {
        "dates": dates
    }


def _calls(calls: pending_callbacks.PendingCalls) -> str:
    lines = [(gettext("callbacks"), ""), (gettext("pending"), f"{calls.pending:,}"), (gettext("failing"), f"{calls.failing:,}")]
    if calls.unknown:
        lines.append((gettext("unknown to this code"), f"{calls.unknown:,}"))
    return table([*lines, (gettext("oldest"), age(calls.oldest))])


def _paused(topics: list[Any]) -> str:
    head = (gettext("paused topic"), gettext("since"), gettext("messages"))
    lines = [head, *((topic.topic, age(topic.paused_at, topic.database_now), f"{topic.messages:,}") for topic in topics)]
    said = [gettext("why"), *(_why_paused(topic) for topic in topics)]
    return "\n".join(f"{line}  {why}" for line, why in zip(table(lines).splitlines(), said, strict=True))


def _why_paused(topic: Any) -> str:
    reason = " ".join(topic.reason.split())
    if topic.is_resuming:
        return gettext("is being resumed")
    if topic.paused_by:
        return gettext("by %(user)s") % {"user": f"{topic.paused_by}{reason and f': {reason}'}"}
    return gettext("the broker refuses it: %(reason)s") % {"reason": reason}


def _state(relay: Any) -> str:
    is_starting = relay.last_pass_at is None and not (relay.silent or relay.waits_for)
    return gettext("starting") if is_starting else state_of(relay)


def _stuck(count: int) -> str:
    return ngettext(
        "%(count)s prepared message is stuck: no checker knows whether the effect happened. Find out, then run "
        "outbox_resume_checks, or decide in the admin.",
        "%(count)s prepared messages are stuck: no checker knows whether the effect happened. Find out, then run "
        "outbox_resume_checks, or decide in the admin.",
        count,
    )


def _none_runs(ready: int) -> str:
    if not ready:
        return gettext("No relay is running.")
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

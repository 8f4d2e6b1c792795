from typing import Any

from outbox import store
from outbox.checkers import checkers
from outbox.console.status_command import StatusCommand, iso, process_as_json, processes, state_of
from outbox.console.terminal import age, table
from outbox.states import State

_COLUMNS = (
    ("last pass", lambda relay: age(relay.last_pass_at, relay.database_now)),
    ("published", lambda relay: f"{relay.published:,}"),
    # What a silent relay does now is not known.
    ("per second", lambda relay: "-" if relay.silent else f"{relay.rate:,.1f}"),
)


class Command(StatusCommand):
    help = (
        "Show how many messages are in each state, how old the oldest waiting one is, which callbacks are pending, and which "
        "relays run."
    )
    app = "outbox"

    def as_json(self, alias: str, options: dict[str, Any]) -> dict[str, Any]:
        calls = store.pending_calls(alias)
        return {
            "states": store.states(alias),
            "oldest_waiting": iso(store.oldest_waiting(alias)),
            "callbacks": {
                "pending": calls.pending,
                "failing": calls.failing,
                "unknown": calls.unknown,
                "oldest": iso(calls.oldest),
            },
            "relays": [_as_json(relay) for relay in store.relays.rows(alias)],
        }

    def drawn(self, alias: str, options: dict[str, Any]) -> str:
        states = store.states(alias)
        relays = list(store.relays.rows(alias))
        counts = [(state, f"{count:,}") for state, count in states.items()]
        drawn = [table([("outbox", alias), *counts, ("oldest waiting", age(store.oldest_waiting(alias)))])]
        calls = store.pending_calls(alias)
        if calls.pending:
            drawn.append(_calls(calls))
        if states[State.STUCK]:
            drawn.append(_stuck(states[State.STUCK]))
        if unchecked := store.topics_unchecked(alias, checkers.topics()):
            drawn.append(f"No checker is registered for prepared messages of: {', '.join(unchecked)}.")
        if relays:
            drawn.append(processes("relay", relays, _COLUMNS, _state))
        if all(relay.silent for relay in relays):
            drawn.append(_none_runs(states[State.READY]))
        return "\n\n".join(drawn)


def _calls(calls: store.PendingCalls) -> str:
    lines = [("callbacks", ""), ("pending", f"{calls.pending:,}"), ("failing", f"{calls.failing:,}")]
    if calls.unknown:
        lines.append(("unknown to this code", f"{calls.unknown:,}"))
    return table([*lines, ("oldest", age(calls.oldest))])


def _state(relay: Any) -> str:
    is_starting = relay.last_pass_at is None and not (relay.silent or relay.waits_for)
    return "starting" if is_starting else state_of(relay)


def _stuck(count: int) -> str:
    return (
        f"{count:,} prepared {'message is' if count == 1 else 'messages are'} stuck: no checker could say what happened. Find "
        "out, then run outbox_resume, or decide in the admin."
    )


def _none_runs(ready: int) -> str:
    if not ready:
        return "No relay is running."
    return f"No relay is running: {ready:,} {'message is' if ready == 1 else 'messages are'} ready."


def _as_json(relay: Any) -> dict[str, Any]:
    rate = None if relay.silent else relay.rate
    return process_as_json(relay, last_pass=iso(relay.last_pass_at), published=relay.published, rate=rate)

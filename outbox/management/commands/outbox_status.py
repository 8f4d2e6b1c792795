import json
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS

from outbox import store
from outbox.checkers import checkers
from outbox.console.terminal import age, table, watch
from outbox.kernel.loop import StopRequest, running_until_signalled
from outbox.kernel.schema import require_schema
from outbox.states import State


class Command(BaseCommand):
    help = "Show how many messages are in each state, how old the oldest waiting one is, what is untold, and which relays run."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias to look at (default: %(default)s)")
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument("--watch", action="store_true", help="redraw every two seconds until Ctrl-C")

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        require_schema(alias, "outbox")
        if options["json"]:
            told = {
                "states": store.states(alias),
                "oldest_waiting": _iso(store.oldest_waiting(alias)),
                "callbacks": _calls_as_json(store.pending_calls(alias)),
                "relays": [_as_json(relay) for relay in store.relays(alias)],
            }
            self.stdout.write(json.dumps(told))
        elif options["watch"]:
            with running_until_signalled(StopRequest()) as stop:
                watch(lambda: _draw(alias), self.stdout.write, 2.0, stop)
        else:
            self.stdout.write(_draw(alias))


def _draw(alias: str) -> str:
    states = store.states(alias)
    relays = list(store.relays(alias))
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
        drawn.append(_relays(relays))
    if all(relay.silent for relay in relays):
        drawn.append(_none_runs(states[State.READY]))
    return "\n\n".join(drawn)


def _calls(calls: store.PendingCalls) -> str:
    lines = [("callbacks", ""), ("pending", f"{calls.pending:,}"), ("failing", f"{calls.failing:,}")]
    if calls.unknown:
        lines.append(("unknown to this code", f"{calls.unknown:,}"))
    return table([*lines, ("oldest", age(calls.oldest))])


def _relays(relays: list[Any]) -> str:
    head = ("relay", "version", "started", "heartbeat", "last pass", "published", "per second")
    lines = [head, *(_cells(relay) for relay in relays)]
    # What a relay waits for is a sentence, which no column has room for.
    said = ["state", *(_state(relay) for relay in relays)]
    return "\n".join(f"{line}  {state}" for line, state in zip(table(lines).splitlines(), said, strict=True))


def _cells(relay: Any) -> tuple[str, ...]:
    instants = (relay.started_at, relay.beat_at, relay.last_pass_at)
    return (
        f"{relay.host}:{relay.pid}",
        relay.version,
        *(age(instant, relay.database_now) for instant in instants),
        f"{relay.published:,}",
        # What a silent relay does now is not known.
        "-" if relay.silent else f"{relay.rate:,.1f}",
    )


def _state(relay: Any) -> str:
    if relay.silent:
        return "silent"
    if relay.waits_for:
        return f"waits for {relay.waits_for}"
    return "starting" if relay.last_pass_at is None else "working"


def _stuck(count: int) -> str:
    return (
        f"{count:,} prepared {'message is' if count == 1 else 'messages are'} stuck: nobody knows what happened. Find out, "
        "then run outbox_resume, or decide in the admin."
    )


def _none_runs(ready: int) -> str:
    if not ready:
        return "No relay is running."
    return f"No relay is running: {ready:,} {'message is' if ready == 1 else 'messages are'} ready."


def _calls_as_json(calls: store.PendingCalls) -> dict[str, Any]:
    return {
        "pending": calls.pending,
        "failing": calls.failing,
        "unknown": calls.unknown,
        "oldest": _iso(calls.oldest),
    }


def _as_json(relay: Any) -> dict[str, Any]:
    return {
        "id": str(relay.id),
        "host": relay.host,
        "pid": relay.pid,
        "version": relay.version,
        "started": _iso(relay.started_at),
        "beat": _iso(relay.beat_at),
        "last_pass": _iso(relay.last_pass_at),
        "published": relay.published,
        "rate": None if relay.silent else relay.rate,
        "waits_for": relay.waits_for,
        "silent": relay.silent,
    }


def _iso(instant: datetime | None) -> str | None:
    return instant.isoformat() if instant else None

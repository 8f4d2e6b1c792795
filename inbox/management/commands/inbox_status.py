import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS

from inbox import store
from inbox.conf import inbox_options
from inbox.consumer.heartbeat import unattended, what_to_start
from inbox.leasing.opening import lease_store
from inbox.leasing.stores import LeaseStoreAway
from outbox.console.terminal import age, table, watch
from outbox.kernel.loop import StopRequest, running_until_signalled
from outbox.kernel.schema import require_schema

_CONFLICTS = 50


class Command(BaseCommand):
    help = (
        "Show what became of every delivery, by state and by cause, how long the oldest message waits, and which consumers run."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias to look at (default: %(default)s)")
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument("--watch", action="store_true", help="redraw every two seconds until Ctrl-C")
        parser.add_argument(
            "--conflicts",
            action="store_true",
            help=f"list the {_CONFLICTS} messages that most recently met their biz-id with other content",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        require_schema(alias, "inbox")
        listed = options["conflicts"]
        if options["json"]:
            self.stdout.write(json.dumps(_told(alias, with_conflicts=listed)))
        elif options["watch"]:
            with running_until_signalled(StopRequest()) as stop:
                watch(lambda: _drawn(alias, with_conflicts=listed), self.stdout.write, 2.0, stop)
        else:
            self.stdout.write(_drawn(alias, with_conflicts=listed))


def _told(alias: str, *, with_conflicts: bool) -> dict[str, Any]:
    balance = store.balance(alias)
    duplicates = balance.duplicates
    told = {
        "states": balance.states,
        "duplicates_suppressed": duplicates.suppressed,
        "duplicates_by_cause": _by_cause(duplicates),
        "duplicates_conflicting": duplicates.conflicting,
        "delivered": balance.delivered,
        "quarantined": balance.quarantined,
        "oldest_waiting": _iso(store.oldest_waiting(alias)),
        "without_rows": _without_rows(),
        "consumers": [_consumer_as_json(consumer) for consumer in store.consumers(alias)],
        "unattended": unattended(alias),
    }
    if with_conflicts:
        told["conflicts"] = [
            {
                "handler": row.handler,
                "topic": row.topic,
                "biz_id": row.biz_id,
                "message_id": row.message_id,
                "conflicting_id": row.conflicting_id,
                "conflicting_at": _iso(row.conflicting_at),
                "conflicts": row.conflicts,
            }
            for row in store.conflicts(alias, _CONFLICTS)
        ]
    return told


def _drawn(alias: str, *, with_conflicts: bool) -> str:
    balance = store.balance(alias)
    duplicates = balance.duplicates
    consumers = list(store.consumers(alias))
    counts = table(
        [
            ("inbox", alias),
            *((state, f"{count:,}") for state, count in balance.states.items()),
            ("duplicates suppressed", f"{duplicates.suppressed:,}"),
            *((f"  {cause}", f"{count:,}") for cause, count in _by_cause(duplicates).items()),
            ("delivered, the sum", f"{balance.delivered:,}"),
            ("duplicates with other content", f"{duplicates.conflicting:,}"),
            ("dead, in quarantine", f"{balance.quarantined:,}"),
            ("oldest waiting", age(store.oldest_waiting(alias))),
            *_leased(),
        ]
    )
    drawn = [counts]
    if consumers:
        drawn.append(_consumers(consumers))
    if names := unattended(alias):
        drawn.append(f"No consumer is running for: {', '.join(names)}. {what_to_start()}")
    if with_conflicts:
        drawn.append(_conflicts(alias))
    return "\n\n".join(drawn)


def _consumers(consumers: Sequence[Any]) -> str:
    head = ("consumer", "version", "started", "heartbeat", "deliveries", "stored run")
    rows = [head, *(_cells(consumer) for consumer in consumers)]
    # What a consumer waits for is a sentence, and its handlers may be many.
    said = ["state", *(f"{_state(consumer)}: {', '.join(consumer.handlers) or 'no handler'}" for consumer in consumers)]
    return "\n".join(f"{line}  {state}" for line, state in zip(table(rows).splitlines(), said, strict=True))


def _cells(consumer: Any) -> tuple[str, ...]:
    return (
        f"{consumer.host}:{consumer.pid}",
        consumer.version,
        age(consumer.started_at, consumer.database_now),
        age(consumer.beat_at, consumer.database_now),
        f"{consumer.received:,}",
        f"{consumer.ran:,}",
    )


def _state(consumer: Any) -> str:
    if consumer.silent:
        return "silent"
    return f"waits for {consumer.waits_for}" if consumer.waits_for else "working"


def _consumer_as_json(consumer: Any) -> dict[str, Any]:
    return {
        "id": str(consumer.id),
        "host": consumer.host,
        "pid": consumer.pid,
        "version": consumer.version,
        "started": _iso(consumer.started_at),
        "beat": _iso(consumer.beat_at),
        "handlers": consumer.handlers,
        "received": consumer.received,
        "ran": consumer.ran,
        "waits_for": consumer.waits_for,
        "silent": consumer.silent,
    }


def _conflicts(alias: str) -> str:
    rows = store.conflicts(alias, _CONFLICTS)
    if not rows:
        return "No biz-id has come with other content."
    head = ("biz-id", "topic", "handler", "first message", "latest other", "others", "latest")
    return table(
        [
            head,
            *(
                (
                    row.biz_id,
                    row.topic,
                    row.handler,
                    row.message_id,
                    row.conflicting_id,
                    f"{row.conflicts:,}",
                    age(row.conflicting_at),
                )
                for row in rows
            ),
        ]
    )


def _leased() -> list[tuple[str, str]]:
    counts = _without_rows()
    if counts is None:
        return [("the store of leases", "does not answer")]
    sums = Counter[str]()
    for of_handler in counts.values():
        sums.update(of_handler)
    return [(f"under leases, without a row: {what}", f"{count:,}") for what, count in sorted(sums.items(), reverse=True)]


def _without_rows() -> Mapping[str, Mapping[str, int]] | None:
    """What has left no row, of the handlers of all databases; None when nobody answers."""
    try:
        return lease_store(inbox_options()).counts()
    except LeaseStoreAway:
        return None


def _by_cause(duplicates: store.Duplicates) -> dict[str, int]:
    return {
        "redelivery": duplicates.redelivery,
        "resend": duplicates.resend,
        "replay": duplicates.replay,
        "business": duplicates.business,
    }


def _iso(instant: datetime | None) -> str | None:
    return instant.isoformat() if instant else None

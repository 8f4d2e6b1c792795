import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from django.core.management.base import CommandParser
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.cli.status import StatusCommand, iso, process_as_json, processes, state_of
from exactly_once.cli.terminal import age, table
from inbox.conf import inbox_options
from inbox.consumer.heartbeat import unattended, what_to_start
from inbox.leases.opening import lease_store
from inbox.leases.stores import LeaseStoreUnavailable
from inbox.store import accounting, heartbeats, operating, pausing, starts

_CONFLICTS = 50
_COLUMNS = (
    (_("deliveries"), lambda consumer: f"{consumer.facts['received']:,}"),
    (_("stored messages run"), lambda consumer: f"{consumer.facts['ran']:,}"),
)


class Command(StatusCommand):
    help = _(  # type: ignore[assignment] # see TranslatedCommand
        "Show the number of deliveries by state and by cause, the age of the oldest waiting message, and the running consumers."
    )
    app = "inbox"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--conflicts",
            action="store_true",
            help=gettext("list the %(count)s messages with the most recent duplicates of different content")
            % {"count": _CONFLICTS},
        )

    def alarming(self) -> Sequence[str]:
        sentence = gettext("No consumer is running for: %(names)s. %(remedy)s")
        none_runs = sentence.partition("%(names)s")[0]
        return r"^dead +[1-9]", rf"  {gettext('silent')}:", rf"^{re.escape(none_runs)}"

    def remarkable(self) -> Sequence[str]:
        waits = gettext("waits for %(what)s") % {"what": ""}
        return r"^(retrying|waiting) +[1-9]", rf"  {re.escape(waits)}"

    def as_json(self, alias: str, options: dict[str, Any]) -> dict[str, Any]:
        balance = accounting.balance(alias)
        duplicates = balance.duplicates
        found = {
            "states": balance.states,
            "duplicates_suppressed": duplicates.suppressed,
            "duplicates_by_cause": _by_cause(duplicates),
            "duplicates_conflicting": duplicates.conflicting,
            "edited": balance.edited,
            "delivered": balance.delivered,
            "quarantined": balance.quarantined,
            "oldest_waiting": iso(operating.oldest_waiting(alias)),
            "without_rows": _without_rows(),
            "consumers": [_as_json(consumer) for consumer in heartbeats.consumers.rows(alias)],
            "unattended": unattended(alias),
            "paused_handlers": [_paused_as_json(row) for row in pausing.paused_handlers(alias)],
            "starting_handlers": [
                {
                    "handler": row.handler,
                    "topic": row.topic,
                    "since": iso(row.asked_at),
                    "begun": row.round_at is not None,
                    "handed_over": row.handed_over,
                }
                for row in starts.incomplete(alias)
            ],
        }
        if options["conflicts"]:
            found["conflicts"] = [
                {
                    "handler": row.handler,
                    "topic": row.topic,
                    "biz_id": row.biz_id,
                    "message_id": row.message_id,
                    "conflicting_id": row.conflicting_id,
                    "conflicting_at": iso(row.conflicting_at),
                    "conflicts": row.conflicts,
                }
                for row in accounting.conflicts(alias, _CONFLICTS)
            ]
        return found

    def drawn(self, alias: str, options: dict[str, Any]) -> str:
        balance = accounting.balance(alias)
        duplicates = balance.duplicates
        consumers = list(heartbeats.consumers.rows(alias))
        counts = table(
            [
                ("inbox", alias),
                *self.with_rates(balance.states, {state: f"{count:,}" for state, count in balance.states.items()}),
                (gettext("duplicates suppressed"), f"{duplicates.suppressed:,}"),
                *((f"  {cause}", f"{count:,}") for cause, count in _by_cause(duplicates).items()),
                (gettext("edited, not delivered"), f"{balance.edited:,}"),
                (gettext("delivered, total"), f"{balance.delivered:,}"),
                (gettext("duplicates with different content"), f"{duplicates.conflicting:,}"),
                (gettext("dead, in quarantine"), f"{balance.quarantined:,}"),
                (gettext("oldest waiting"), age(operating.oldest_waiting(alias))),
                *_leased(),
            ]
        )
        drawn = [counts]
        if consumers:
            drawn.append(processes(gettext("consumer"), consumers, _COLUMNS, _state))
        if paused := list(pausing.paused_handlers(alias)):
            drawn.append(_paused(paused))
        if starting := list(starts.incomplete(alias)):
            head = (gettext("waits for its past"), gettext("since"), gettext("handed over"))
            drawn.append(table([head, *((row.handler, age(row.asked_at), f"{row.handed_over:,}") for row in starting)]))
        if unknown := [row.handler for row in starting if row.round_at is None]:
            sentence = gettext(
                "No relay has begun to hand over the past of: %(names)s. Restart `outbox_relay` with their code."
            )
            drawn.append(sentence % {"names": ", ".join(unknown)})
        if names := unattended(alias):
            drawn.append(
                gettext("No consumer is running for: %(names)s. %(remedy)s")
                % {"names": ", ".join(names), "remedy": what_to_start()}
            )
        if options["conflicts"]:
            drawn.append(_conflicts(alias))
        return "\n\n".join(drawn)


def _paused(handlers: list[Any]) -> str:
    head = (gettext("paused handler"), gettext("since"), gettext("stored"))
    lines = [head, *((row.handler, age(row.paused_at, row.database_now), f"{row.messages:,}") for row in handlers)]
    said = [gettext("why"), *(" ".join(_why(row).split()) for row in handlers)]
    return "\n".join(f"{line}  {why}" for line, why in zip(table(lines).splitlines(), said, strict=True))


def _why(row: Any) -> str:
    return gettext("by %(user)s") % {"user": f"{row.paused_by}: {row.reason}"}


def _paused_as_json(row: Any) -> dict[str, Any]:
    return {
        "handler": row.handler,
        "messages": row.messages,
        "since": iso(row.paused_at),
        "by": row.paused_by,
        "reason": row.reason,
    }


def _state(consumer: Any) -> str:
    handlers = ", ".join(consumer.facts["handlers"]) or gettext("no handler")
    return f"{state_of(consumer)}: {handlers}"


def _as_json(consumer: Any) -> dict[str, Any]:
    return process_as_json(consumer, **consumer.facts)


def _conflicts(alias: str) -> str:
    rows = accounting.conflicts(alias, _CONFLICTS)
    if not rows:
        return gettext("No duplicate has had different content.")
    head = ("biz-id", "topic", "handler", "first message", "latest conflict", "conflicts", "latest")
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
        return [("lease store", "unavailable")]
    sums = Counter[str]()
    for of_handler in counts.values():
        sums.update(of_handler)
    return [(f"under leases, without a row: {what}", f"{count:,}") for what, count in sorted(sums.items(), reverse=True)]


def _without_rows() -> Mapping[str, Mapping[str, int]] | None:
    """Counts of messages under leases without a row, for all handlers; None if the lease store is unavailable."""
    try:
        return lease_store(inbox_options()).counts()
    except LeaseStoreUnavailable:
        return None


def _by_cause(duplicates: accounting.Duplicates) -> dict[str, int]:
    return {
        "redelivery": duplicates.redelivery,
        "resend": duplicates.resend,
        "replay": duplicates.replay,
        "business": duplicates.business,
    }

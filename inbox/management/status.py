"""The inbox's part of the commands and health checks for both apps."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from django.utils.translation import gettext as _

from exactly_once.console.cli.terminal import BOLD, RED, YELLOW, Line, Table, age, sentence
from exactly_once.half import Check
from exactly_once.transport.broker import is_local
from inbox.conf import inbox_options
from inbox.handlers.options import past_in_words
from inbox.handlers.registry import registry
from inbox.leases.stores import LeaseStoreUnavailable, lease_store
from inbox.operators import accounting
from inbox.operators.handler_pauses import paused_handlers
from inbox.operators.processes import queued, unattended
from inbox.states import State
from inbox.store import handler_rows

_CONFLICTS = 50
_CAUSES = ("redelivery", "resend", "replay", "business")
_OF_A_CONFLICT = ("handler", "topic", "biz_id", "message_id", "conflicting_id", "conflicting_at", "conflicts")
_OF_A_PAUSE = {"handler": "handler", "messages": "messages", "since": "paused_at", "by": "paused_by", "reason": "reason"}
_STYLES: Mapping[str, str] = {State.DEAD: RED, State.RETRYING: YELLOW, State.WAITING: YELLOW}


def kinds() -> list[str]:
    """With local:// the relay runs the handlers, too."""
    return ["consumer", "relay"] if is_local(inbox_options().broker_url) else ["consumer"]


def checks(alias: str, processes: Sequence[Any]) -> list[Check]:
    """Does a live process run each handler of this project on this database?"""
    attended = {name for row in processes if not row.silent for name in row.facts["handlers"]}
    handlers = (handler.name for handler in registry.all() if handler.using == alias)
    if missing := sorted(name for name in handlers if name not in attended):
        return [Check(name="handlers", status="unattended", detail=", ".join(missing))]
    return [Check(name="handlers")]


def figures(alias: str, *, conflicts: bool) -> dict[str, Any]:
    balance = accounting.balance(alias)
    duplicates = balance.duplicates
    found = {
        "states": balance.states,
        "duplicates_suppressed": duplicates.suppressed,
        "duplicates_by_cause": {cause: getattr(duplicates, cause) for cause in _CAUSES},
        "duplicates_conflicting": duplicates.conflicting,
        "edited": balance.edited,
        "delivered": balance.delivered,
        "quarantined": balance.quarantined,
        "oldest_waiting": accounting.oldest_waiting(alias),
        "without_rows": _without_rows(),
        "unattended": unattended(alias),
        "queued": queued(alias),
        "paused_handlers": [
            {name: getattr(row, column) for name, column in _OF_A_PAUSE.items()} for row in paused_handlers(alias)
        ],
        "starting_handlers": [
            {
                "handler": row.handler,
                "topics": registry.topics_of(row.handler),
                "gets": past_in_words(row.since),
                "since": row.asked_at,
                "begun": row.round_at is not None,
                "handed_over": row.handed_over,
            }
            for row in handler_rows.incomplete_starts(alias)
        ],
    }
    if conflicts:
        rows = accounting.conflicts(alias, _CONFLICTS)
        found["conflicts"] = [{name: getattr(row, name) for name in _OF_A_CONFLICT} for row in rows]
    return found


def tables(alias: str, rates: Callable[[str, int], str], *, conflicts: bool) -> Iterator[Table]:
    found = figures(alias, conflicts=conflicts)
    yield _counts(alias, found, rates)
    if paused := found["paused_handlers"]:
        head = Line([_("paused handler"), _("since"), _("stored"), _("why")], BOLD)
        lines = [Line([row["handler"], age(row["since"]), f"{row['messages']:,}", _why(row)]) for row in paused]
        yield Table([head, *lines], texts=1)
    if starting := found["starting_handlers"]:
        head = Line([_("waits for its past"), _("gets"), _("since"), _("handed over")], BOLD)
        cells = [[row["handler"], row["gets"], age(row["since"]), f"{row['handed_over']:,}"] for row in starting]
        yield Table([head, *map(Line, cells)])
    if unknown := [row["handler"] for row in starting if not row["begun"]]:
        words = _("No relay has begun to hand over the past of: %(names)s. Restart `outbox_relay` with their code.")
        yield sentence(words % {"names": ", ".join(unknown)}, RED)
    if conflicts:
        yield _conflicts(found["conflicts"])


def _counts(alias: str, figures: Mapping[str, Any], rates: Callable[[str, int], str]) -> Table:
    return Table(
        [
            Line(["inbox", alias], BOLD),
            *(
                Line([state, f"{count:,}", rates(f"inbox {state}", count)], _STYLES.get(state, "") if count else "")
                for state, count in figures["states"].items()
            ),
            Line([_("duplicates suppressed"), f"{figures['duplicates_suppressed']:,}"]),
            *(Line([f"  {cause}", f"{count:,}"]) for cause, count in figures["duplicates_by_cause"].items()),
            Line([_("edited, not delivered"), f"{figures['edited']:,}"]),
            Line([_("delivered, total"), f"{figures['delivered']:,}"]),
            Line([_("duplicates with different content"), f"{figures['duplicates_conflicting']:,}"]),
            Line([_("dead, in quarantine"), f"{figures['quarantined']:,}"]),
            Line([_("oldest waiting"), age(figures["oldest_waiting"])]),
            *(
                Line([_("at the broker: %(name)s") % {"name": name}, f"{count:,}", rates(f"queued {name}", count)])
                for name, count in sorted(figures["queued"].items())
            ),
            *_leased(figures["without_rows"]),
        ]
    )


def _why(row: Mapping[str, Any]) -> str:
    return " ".join((_("by %(user)s") % {"user": f"{row['by']}: {row['reason']}"}).split())


def _conflicts(rows: Sequence[Mapping[str, Any]]) -> Table:
    if not rows:
        return sentence(_("No duplicate has had different content."))
    head = ["biz-id", _("topic"), _("handler"), _("first message"), _("latest conflict"), _("conflicts"), _("latest")]
    names = itemgetter("biz_id", "topic", "handler", "message_id", "conflicting_id")
    lines = [Line([*names(row), f"{row['conflicts']:,}", age(row["conflicting_at"])]) for row in rows]
    return Table([Line(head, BOLD), *lines], texts=len(head))


def _leased(counts: Mapping[str, Mapping[str, int]] | None) -> list[Line]:
    if counts is None:
        return [Line([_("lease store"), _("unavailable")], RED)]
    sums = Counter[str]()
    for of_handler in counts.values():
        sums.update(of_handler)
    return [Line([f"under leases, without a row: {what}", f"{count:,}"]) for what, count in sorted(sums.items(), reverse=True)]


def _without_rows() -> Mapping[str, Mapping[str, int]] | None:
    """Counts of messages under leases without a row, for all handlers; None if the lease store is unavailable."""
    try:
        return lease_store(inbox_options()).counts()
    except LeaseStoreUnavailable:
        return None

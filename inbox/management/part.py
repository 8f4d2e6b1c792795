"""The inbox's part of the commands and health checks for both apps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

from django.utils.translation import gettext as _

from exactly_once.broker import is_local
from exactly_once.cli.parts import Check, Part
from exactly_once.cli.terminal import BOLD, RED, YELLOW, Line, Table, age, sentence
from exactly_once.process.life_sign import LifeSign, life_signs
from inbox.conf import inbox_options
from inbox.consumer.heartbeat import CONSUMERS, unattended
from inbox.handlers.options import past_in_words
from inbox.handlers.registry import registry
from inbox.leases.opening import lease_store
from inbox.leases.stores import LeaseStoreUnavailable
from inbox.models import TrailEntry
from inbox.operators import accounting, pausing, purging
from inbox.operators.dead_letters import letters
from inbox.operators.operations import operations
from inbox.states import State
from inbox.store import starts

_CONFLICTS = 50
_OF_A_CONFLICT = ("handler", "topic", "biz_id", "message_id", "conflicting_id", "conflicting_at", "conflicts")
_STYLES: Mapping[str, str] = {State.DEAD: RED, State.RETRYING: YELLOW, State.WAITING: YELLOW}


class InboxPart(Part):
    processes, kind = CONSUMERS, "consumer"
    letters, history, trail, operations, options = letters, purging.HISTORY, TrailEntry, operations, staticmethod(inbox_options)
    remains = purging.remains

    def retention(self) -> timedelta:
        return inbox_options().KEEP_HISTORY

    def life_signs(self) -> list[LifeSign]:
        signs = life_signs(self.kind)
        if is_local(inbox_options().broker_url):
            signs += life_signs("relay")  # it runs the handlers
        return signs

    def further_checks(self, alias: str, heartbeats: Sequence[Any]) -> list[Check]:
        """Does a live process run each handler of this project on this database?"""
        attended = {name for row in heartbeats if not row.silent for name in row.facts["handlers"]}
        handlers = (handler.name for handler in registry.all() if handler.using == alias)
        if missing := sorted(name for name in handlers if name not in attended):
            return [Check(name="handlers", status="unattended", detail=", ".join(missing))]
        return [Check(name="handlers")]

    def figures(self, alias: str, *, conflicts: bool) -> dict[str, Any]:
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
            "oldest_waiting": accounting.oldest_waiting(alias),
            "without_rows": _without_rows(),
            "unattended": unattended(alias),
            "paused_handlers": [_paused_as_json(row) for row in pausing.paused_handlers(alias)],
            "starting_handlers": [
                {
                    "handler": row.handler,
                    "topics": registry.topics_of(row.handler),
                    "gets": past_in_words(row.since),
                    "since": row.asked_at,
                    "begun": row.round_at is not None,
                    "handed_over": row.handed_over,
                }
                for row in starts.incomplete(alias)
            ],
        }
        if conflicts:
            rows = accounting.conflicts(alias, _CONFLICTS)
            found["conflicts"] = [{name: getattr(row, name) for name in _OF_A_CONFLICT} for row in rows]
        return found

    def tables(self, alias: str, rates: Callable[[str, int], str], *, conflicts: bool) -> Iterator[Table]:
        yield _counts(alias, rates)
        if paused := list(pausing.paused_handlers(alias)):
            yield _paused(paused)
        if starting := list(starts.incomplete(alias)):
            head = Line([_("waits for its past"), _("gets"), _("since"), _("handed over")], BOLD)
            yield Table(
                [
                    head,
                    *(
                        Line([row.handler, past_in_words(row.since), age(row.asked_at), f"{row.handed_over:,}"])
                        for row in starting
                    ),
                ]
            )
        if unknown := [row.handler for row in starting if row.round_at is None]:
            words = _("No relay has begun to hand over the past of: %(names)s. Restart `outbox_relay` with their code.")
            yield sentence(words % {"names": ", ".join(unknown)}, RED)
        if conflicts:
            yield _conflicts(alias)


def _counts(alias: str, rates: Callable[[str, int], str]) -> Table:
    balance = accounting.balance(alias)
    duplicates = balance.duplicates
    return Table(
        [
            Line(["inbox", alias], BOLD),
            *(
                Line([state, f"{count:,}", rates(f"inbox {state}", count)], _STYLES.get(state, "") if count else "")
                for state, count in balance.states.items()
            ),
            Line([_("duplicates suppressed"), f"{duplicates.suppressed:,}"]),
            *(Line([f"  {cause}", f"{count:,}"]) for cause, count in _by_cause(duplicates).items()),
            Line([_("edited, not delivered"), f"{balance.edited:,}"]),
            Line([_("delivered, total"), f"{balance.delivered:,}"]),
            Line([_("duplicates with different content"), f"{duplicates.conflicting:,}"]),
            Line([_("dead, in quarantine"), f"{balance.quarantined:,}"]),
            Line([_("oldest waiting"), age(accounting.oldest_waiting(alias))]),
            *_leased(),
        ]
    )


def _paused(handlers: list[Any]) -> Table:
    head, by = Line([_("paused handler"), _("since"), _("stored"), _("why")], BOLD), _("by %(user)s")
    whys = [" ".join((by % {"user": f"{row.paused_by}: {row.reason}"}).split()) for row in handlers]
    lines = [
        Line([row.handler, age(row.paused_at, row.database_now), f"{row.messages:,}", why])
        for row, why in zip(handlers, whys, strict=True)
    ]
    return Table([head, *lines], texts=1)


def _paused_as_json(row: Any) -> dict[str, Any]:
    return {
        "handler": row.handler,
        "messages": row.messages,
        "since": row.paused_at,
        "by": row.paused_by,
        "reason": row.reason,
    }


def _conflicts(alias: str) -> Table:
    rows = accounting.conflicts(alias, _CONFLICTS)
    if not rows:
        return sentence(_("No duplicate has had different content."))
    head = ["biz-id", _("topic"), _("handler"), _("first message"), _("latest conflict"), _("conflicts"), _("latest")]
    cells = attrgetter("biz_id", "topic", "handler", "message_id", "conflicting_id")
    lines = [Line([*cells(row), f"{row.conflicts:,}", age(row.conflicting_at)]) for row in rows]
    return Table([Line(head, BOLD), *lines], texts=len(head))


def _leased() -> list[Line]:
    counts = _without_rows()
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


def _by_cause(duplicates: accounting.Duplicates) -> dict[str, int]:
    return {cause: getattr(duplicates, cause) for cause in ("redelivery", "resend", "replay", "business")}

"""Was an effect lost, doubled, too early, or caused by an order that was rolled back or cancelled?

The idea: count facts independently of the code under test, then compare. The simulated customers record the number of each
order when its transaction has ended. The effects are counted in the business tables, which have no unique constraint that
could hide a second effect. This module only compares, and accesses no database.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

ORDER = "orders"
MOVEMENT = "stock movements"
PAYMENT = "payments"
PAID = "orders paid"
SHIPMENT = "shipments"
SHIPPED = "orders shipped"
SMS = "SMS"
REVIEW_REQUEST = "review requests"
RECEIPT = "receipts mailed"
REMINDER = "reminders sent or spared"
RATING = "ratings"
RATING_CLOSED = "ratings closed"
REPORTED = "orders reported"

WITHDRAWAL = "withdrawals"
DEPOSIT = "deposits"

EFFECTS = (
    ORDER,
    MOVEMENT,
    PAYMENT,
    PAID,
    RECEIPT,
    SHIPMENT,
    SHIPPED,
    SMS,
    REMINDER,
    REVIEW_REQUEST,
    RATING,
    RATING_CLOSED,
    REPORTED,
)
"""What must have happened exactly once for every committed order, and never for any other.

An order that was cancelled must have no effect but the order itself.
"""

DUE_LATER = {
    SMS: "no SMS was due later",
    REVIEW_REQUEST: "no review request was due later",
    RECEIPT: "no receipt was refused and tried again later",
}
"""Effects that must have been due later at least once in a run, and what to report of a run without any."""

Counts = Mapping[str, int]
"""How often, by order number."""

SETTLED = {"published", "cancelled", "expired", "rolled_back", "done", "skipped", "shed", "dead"}


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The run's rows in the outbox and the inbox.

    Attributes:
        outbox, inbox: how many, by state.
        messages: rows of both by order number, but for outbox rows that were cancelled.
        suppressed: what the inbox has counted as duplicates.
        contradictions: messages with a known biz-id and other content.
    """

    outbox: Counts = field(default_factory=dict)
    inbox: Counts = field(default_factory=dict)
    messages: Counts = field(default_factory=dict)
    suppressed: int = 0
    contradictions: int = 0

    @property
    def open(self) -> dict[str, int]:
        """The messages that are not settled, by table and state."""
        return {
            f"{table}, {state}": count
            for table, states in (("outbox", self.outbox), ("inbox", self.inbox))
            for state, count in sorted(states.items())
            if state not in SETTLED
        }

    @property
    def dead(self) -> int:
        """The dead letters."""
        return self.outbox.get("dead", 0) + self.inbox.get("dead", 0)


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """What was counted at the two banks.

    Attributes:
        sent, refused: names of transfers, by the result that their customers got.
        withdrawn, deposited: how often, by name, in the book of each bank.
        given_up: tombstones of transfers that the checker has ruled out.
        money_missing: the amount that both accounts together have lost.
    """

    sent: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    withdrawn: Counts = field(default_factory=dict)
    deposited: Counts = field(default_factory=dict)
    given_up: int = 0
    money_missing: int = 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The counts when nothing was left to do, or after the timeout.

    Attributes:
        wanted: orders that were to be placed.
        committed, rolled_back, taken_back: order numbers that the customers recorded; a cancelled order was committed.
        rated: order numbers that customers rated themselves, as they recorded them.
        effects: by name, one of `EFFECTS`.
        rated_by_itself: order numbers that have the automatic rating in the table.
        lateness: how long after its due time an effect happened, by the database's clock; negative is early. By name of the
            effect and order number. A receipt is due `SHOP_MAIL_RETRY_AFTER` after its refusal; one that was not refused is
            not listed.
        transfers, traffic: the counts at the two banks, and in the outbox and the inbox.
        stock_differences: products whose quantity is not the sum of their movements, with the difference.
        injected: messages sent a second time on purpose, counted once per handler that gets the copy.
        copied: how many of these were copies of a message on the broker; None without a broker.
        repeated_calls: calls of the webhook with an event that was stored already.
        forged_calls, contradicting_calls: calls of the webhook that had to be refused.
        refused_calls: calls that it refused.
        too_late: orders that their customers tried to cancel too late.
        kills_wanted, kills: processes to be killed, and killed.
        bad_ends: processes that ended by themselves, or with an exit status other than 0, in words.
        unfinished: what was still missing at the timeout, in words.
    """

    wanted: int
    committed: frozenset[str]
    rolled_back: frozenset[str]
    effects: Mapping[str, Counts]
    taken_back: frozenset[str] = frozenset()
    rated: frozenset[str] = frozenset()
    rated_by_itself: frozenset[str] = frozenset()
    lateness: Mapping[str, Mapping[str, timedelta]] = field(default_factory=dict)
    transfers: Transfers = Transfers()
    traffic: Traffic = Traffic()
    stock_differences: Counts = field(default_factory=dict)
    injected: int = 0
    copied: int | None = None
    repeated_calls: int = 0
    forged_calls: int = 0
    contradicting_calls: int = 0
    refused_calls: int = 0
    too_late: int = 0
    kills_wanted: int = 0
    kills: int = 0
    bad_ends: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()

    @property
    def receipts_retried(self) -> int:
        """How many receipts were mailed after the provider had refused them."""
        return len(self.lateness.get(RECEIPT, {}))

    @property
    def kept(self) -> frozenset[str]:
        """The orders that must have all effects."""
        return self.committed - self.taken_back


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An order or a transfer, and an effect of it that is wrong."""

    effect: str
    order: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Early:
    """One effect that happened before its time, by so many seconds."""

    effect: str
    order: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The verdict.

    Attributes:
        lost: effects of committed orders that did not happen.
        doubled: effects that happened more than once.
        ghosts: effects and messages of orders that were rolled back or taken back, or that were never placed.
        early: effects that happened before they were due.
        problems: every other reason why this run proves nothing, in words.
    """

    facts: Facts
    lost: tuple[Finding, ...]
    doubled: tuple[Finding, ...]
    ghosts: tuple[Finding, ...]
    early: tuple[Early, ...]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not (self.lost or self.doubled or self.ghosts or self.early or self.problems)

    def total(self, effect: str) -> int:
        return sum(self.facts.effects.get(effect, {}).values())


def audit(facts: Facts) -> Audit:
    """Compare what happened with what was ordered."""
    return Audit(
        facts=facts,
        lost=tuple(_lost(facts)),
        doubled=tuple(_doubled(facts)),
        ghosts=tuple(_ghosts(facts)),
        early=tuple(_early(facts)),
        problems=tuple(_problems(facts)),
    )


def _lost(facts: Facts) -> Iterator[Finding]:
    for effect in EFFECTS:
        counts = facts.effects.get(effect, {})
        for order in sorted(facts.committed if effect == ORDER else facts.kept):
            if not counts.get(order):
                yield Finding(effect=effect, order=order, count=0)
    transfers = facts.transfers
    for effect, counts in ((WITHDRAWAL, transfers.withdrawn), (DEPOSIT, transfers.deposited)):
        for name in sorted({*transfers.sent, *transfers.withdrawn} - counts.keys()):
            yield Finding(effect=effect, order=name, count=0)


def _doubled(facts: Facts) -> Iterator[Finding]:
    books = {WITHDRAWAL: facts.transfers.withdrawn, DEPOSIT: facts.transfers.deposited}
    for effect, counts in {**facts.effects, **books}.items():
        for order, count in sorted(counts.items()):
            if count > 1:
                yield Finding(effect=effect, order=order, count=count)


def _ghosts(facts: Facts) -> Iterator[Finding]:
    for effect, counts in {**facts.effects, "messages": facts.traffic.messages}.items():
        for order, count in sorted(counts.items()):
            if count and order not in (facts.committed if effect == ORDER else facts.kept):
                yield Finding(effect=effect, order=order, count=count)

    transfers = facts.transfers
    for name, count in sorted(transfers.deposited.items()):
        if name not in transfers.withdrawn or name in transfers.refused:
            yield Finding(effect=DEPOSIT, order=name, count=count)
    for name in sorted(transfers.refused & transfers.withdrawn.keys()):
        yield Finding(effect=WITHDRAWAL, order=name, count=transfers.withdrawn[name])


def _early(facts: Facts) -> Iterator[Early]:
    for effect, spans in facts.lateness.items():
        for order, span in sorted(spans.items()):
            if span < timedelta():
                yield Early(effect=effect, order=order, seconds=-span.total_seconds())


def _problems(facts: Facts) -> Iterator[str]:
    yield from (f"not finished in time: {missing}" for missing in facts.unfinished)
    yield from facts.bad_ends
    for product, difference in sorted(facts.stock_differences.items()):
        yield f"the stock of {product} differs by {difference:+} from the sum of its movements"
    for order in sorted(facts.rated & facts.rated_by_itself):
        yield f"the customer of {order} rated it, and it has five stars by itself"
    if facts.transfers.money_missing:
        yield f"of the money at both banks {facts.transfers.money_missing} is missing"
    if facts.traffic.dead:
        yield f"{facts.traffic.dead} dead letters"
    if facts.traffic.contradictions:
        yield f"{facts.traffic.contradictions} messages contradicted an earlier one with their biz-id"
    if facts.traffic.suppressed < facts.injected:
        yield f"{facts.injected} duplicates were injected and only {facts.traffic.suppressed} suppressed"
    refusable = facts.forged_calls + facts.contradicting_calls
    if facts.refused_calls != refusable:
        yield f"{refusable} calls of the webhook were to be refused, and {facts.refused_calls} were"
    yield from _vacuities(facts)


def _vacuities(facts: Facts) -> Iterator[str]:
    """Why a run that looks clean would prove nothing."""
    if not facts.committed or len(facts.committed) != facts.wanted:
        yield f"{len(facts.committed)} of {facts.wanted} orders were placed"
    if not facts.rolled_back:
        yield "no order was rolled back, so ghosts had no chance"
    if not facts.taken_back:
        yield "no order was taken back, so taking back had no chance"
    yield from (
        f"{nothing}, so an early one had no chance" for name, nothing in DUE_LATER.items() if not facts.lateness.get(name)
    )
    if not facts.transfers.deposited:
        yield "no money was transferred, so losing it had no chance"
    if not facts.transfers.given_up:
        yield "no transfer was given up by the checker, so a late withdrawal had no chance"
    if not facts.injected:
        yield "no duplicate was injected, so doubled effects had no chance"
    if facts.copied == 0:
        yield "no message was copied on the broker, so redelivery had no chance"
    if facts.kills < facts.kills_wanted:
        yield f"{facts.kills} of {facts.kills_wanted} kills fired"

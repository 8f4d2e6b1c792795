"""The actual operations and effects, recorded in two tables that the product does not know.

The producer writes a row of `Unique` in the transaction that publishes: it is there if and only if that transaction has
committed, also when the answer to the commit was lost. The handler writes a row of `Effect`, which nothing stops from being
there twice.

What is committed about an operation later, or beside it, is a `Fact`: another row of `Unique`, written in the transaction that
makes it true.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from tests.support.apps.effects.models import Effect, Unique

CHAINED = "chained:"
"""Prefix of the effect of a message that a handler published."""
CHAINS = "chain-"
"""Prefix of an operation whose handler publishes another message."""
EXPIRES = "expires-"
"""Prefix of an operation whose message had expired before it could be published."""


class Fact(StrEnum):
    """A fact about an operation; `of` is the name of the row that records it."""

    CANCELLED = "cancelled"
    """Its message was cancelled before it was due: it has no effect."""
    CANCELLED_LATE = "cancelled late"
    """Its message was cancelled when it was due already: a relay that died before it could settle may have sent it, once."""
    NOT_BEFORE = "not before"
    """Its message is due at this instant, by the database's clock: no effect comes earlier."""
    PREPARED = "prepared"
    """Its message was prepared. The row of the operation says whether the operation took place, as always."""
    DECIDED = "decided"
    """A prepared operation has taken place, or its checker has made sure that it never will."""

    def of(self, operation: str, at: datetime | None = None) -> str:
        return f"{self}:{operation}" if at is None else f"{self}:{operation}:{at.isoformat()}"


@dataclass(frozen=True)
class Verdict:
    """The faults that were found, and what may look like a fault.

    Attributes:
        committed: operations.
        lost: committed without effect.
        doubled: with more than one effect.
        ghosts: effects of what must have none: never committed, rolled back, expired, or cancelled in time.
        early: effects before their instant.
        overtaken: effects of messages that were cancelled when they were due already; they are correct.
    """

    committed: int
    lost: frozenset[str] = frozenset()
    doubled: frozenset[str] = frozenset()
    ghosts: frozenset[str] = frozenset()
    early: frozenset[str] = frozenset()
    overtaken: frozenset[str] = frozenset()

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.doubled or self.ghosts or self.early)

    def __str__(self) -> str:
        counts = (
            f"committed {self.committed}, lost {len(self.lost)}, doubled {len(self.doubled)}, ghosts {len(self.ghosts)}, "
            f"early {len(self.early)}, overtaken {len(self.overtaken)}"
        )
        examples = sorted(self.lost | self.doubled | self.ghosts | self.early)[:5]
        return f"{counts}{f' (for example {examples})' if examples else ''}"


@dataclass
class _Records:
    """The rows of `Unique`: operations, those of which a fact is true, and the instants."""

    operations: set[str] = field(default_factory=set)
    facts: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    instants: dict[str, datetime] = field(default_factory=dict)

    @classmethod
    def read(cls) -> _Records:
        records = cls()
        for name in Unique.objects.values_list("name", flat=True):
            fact, is_fact, operation = name.partition(":")
            if not is_fact:
                records.operations.add(name)
            elif fact == Fact.NOT_BEFORE:
                operation, _, instant = operation.partition(":")
                records.instants[operation] = datetime.fromisoformat(instant)
            else:
                records.facts[Fact(fact)].add(operation)
        return records

    @property
    def cancelled(self) -> set[str]:
        return self.facts[Fact.CANCELLED] | self.facts[Fact.CANCELLED_LATE]

    @property
    def expired(self) -> set[str]:
        return {operation for operation in self.operations if operation.startswith(EXPIRES)}


def verdict() -> Verdict:
    records = _Records.read()
    operations = records.operations - records.cancelled - records.expired
    due = operations | {CHAINED + operation for operation in operations if operation.startswith(CHAINS)}
    effects = list(Effect.objects.values_list("name", "at"))
    times = Counter(name for name, _ in effects)
    overtaken = times.keys() & records.facts[Fact.CANCELLED_LATE]
    return Verdict(
        committed=len(records.operations),
        lost=frozenset(due - times.keys()),
        doubled=frozenset(name for name, number in times.items() if number > 1),
        ghosts=frozenset(times.keys() - due - overtaken),
        early=frozenset(name for name, at in effects if name in records.instants and at < records.instants[name]),
        overtaken=frozenset(overtaken),
    )


def punctual(within: timedelta) -> int:
    """How many effects came no later than that after their instant: if all were late, an early one could not be seen."""
    instants = _Records.read().instants
    effects = Effect.objects.filter(name__in=instants).values_list("name", "at")
    return sum(at - instants[name] <= within for name, at in effects)


def rows_due() -> Counter[str]:
    """How many outbox rows must have been committed by now, by the state in which each of them ends.

    One for each operation, one for each chained effect, and one for each prepared message whose operation did not take place.
    """
    records = _Records.read()
    names = set(Effect.objects.filter(name__startswith=CHAINS).values_list("name", flat=True))
    ended = {
        "cancelled": len(records.cancelled),
        "expired": len(records.expired),
        "rolled_back": len(records.facts[Fact.PREPARED] - records.operations),
    }
    published = len(records.operations) + len(names) - ended["cancelled"] - ended["expired"]
    return Counter({"published": published, **ended})

"""What really happened, by two tables that the product does not know.

The producer writes a row of `Unique` in the transaction that publishes: it is there if and only if that transaction has
committed, also when the answer to the commit was lost. The handler writes a row of `Effect`, which nothing stops from being
there twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.support.apps.effects.models import Effect, Unique

CHAINED = "chained:"
"""Prefix of the effect of a message that a handler published."""
CHAINS = "chain-"
"""Prefix of an operation whose handler publishes another message."""


@dataclass(frozen=True)
class Verdict:
    """lost: committed without effect. doubled: with more than one. ghosts: effects of what was never committed."""

    committed: int
    lost: frozenset[str]
    doubled: frozenset[str]
    ghosts: frozenset[str]

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.doubled or self.ghosts)

    def __str__(self) -> str:
        counts = f"committed {self.committed}, lost {len(self.lost)}, doubled {len(self.doubled)}, ghosts {len(self.ghosts)}"
        examples = sorted(self.lost | self.doubled | self.ghosts)[:5]
        return f"{counts}{f' (for example {examples})' if examples else ''}"


def verdict() -> Verdict:
    operations = set(Unique.objects.values_list("name", flat=True))
    due = operations | {CHAINED + operation for operation in operations if operation.startswith(CHAINS)}
    effects = Counter(Effect.objects.values_list("name", flat=True))
    return Verdict(
        committed=len(operations),
        lost=frozenset(due - effects.keys()),
        doubled=frozenset(name for name, times in effects.items() if times > 1),
        ghosts=frozenset(effects.keys() - due),
    )


def messages_due() -> int:
    """How many outbox rows must have been committed by now: one for each operation, and one for each chained effect."""
    chained = Effect.objects.filter(name__startswith=CHAINS).values("name").distinct().count()
    return Unique.objects.count() + chained

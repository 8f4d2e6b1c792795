"""The number of shards that one relay tries to claim, without knowing how many relays there are.

Additive increase, multiplicative decrease (Chiu and Jain, 1989), as in TCP: a relay that finds a shard claimed by another
halves its number, one that finds all of them free raises it by a few. Several relays converge to equal shares; a single relay
gets all shards.
"""

import random
from collections.abc import Sequence

from outbox.store.claiming import BusyShard

_LEAST = 8
_STEP = 4


class Share:
    """One relay's share of `shards`, their total number."""

    def __init__(self, shards: int) -> None:
        self._shards = self._most = shards

    @property
    def most(self) -> int:
        """How many shards it tries now in one pass."""
        return self._most

    def of(self, shards: Sequence[BusyShard]) -> list[BusyShard]:
        """The shards to try next, chosen at random so that relays seldom conflict and no shard is always last."""
        return random.sample(shards, min(len(shards), self._most))

    def record(self, refused: int) -> None:
        """Record that `refused` of the tried shards were claimed by others."""
        self._most = max(self._most // 2, _LEAST) if refused else min(self._most + _STEP, self._shards)

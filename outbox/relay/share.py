"""How many shards should one relay take at a time, when nobody tells it how many relays there are?

Additive increase, multiplicative decrease (Chiu and Jain, 1989), as TCP shares a line: a relay that finds a shard taken halves
what it asks for, one that finds all of them free asks for a few more. Equals end up with equal parts; one alone has everything.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from outbox.store import Busy

_LEAST = 8
_STEP = 4


class Share:
    """One relay's part of `shards`, the number of those that it may take."""

    def __init__(self, shards: int) -> None:
        self._shards = self._most = shards

    def of(self, busy: Sequence[Busy]) -> list[Busy]:
        """Those to try next, at random so that relays meet seldom and no shard is always last."""
        return random.sample(busy, min(len(busy), self._most))

    def note(self, refused: int) -> None:
        """So many of those that were tried were taken by somebody else."""
        self._most = max(self._most // 2, _LEAST) if refused else min(self._most + _STEP, self._shards)

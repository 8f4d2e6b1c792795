"""In which order may a batch be sent at once?

Confirms of a pipelined batch come out of order, so two messages of one key must not be under way together: if the first is
nacked and the second confirmed, their order is lost. The k-th message of every key makes the k-th *wave*; a wave is sent
when the one before has been answered. Messages without a key promise nothing and all travel in the first.
"""

from __future__ import annotations

from collections.abc import Iterable

from outbox.store import RelayedMessage


def waves(batch: Iterable[RelayedMessage]) -> list[list[RelayedMessage]]:
    """Split `batch`, which is in sending order, into waves."""
    split: list[list[RelayedMessage]] = []
    seen: dict[str, int] = {}
    for message in batch:
        wave = 0
        if message.key:
            wave = seen.get(message.key, 0)
            seen[message.key] = wave + 1
        if wave == len(split):
            split.append([])
        split[wave].append(message)
    return split

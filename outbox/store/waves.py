"""Split a batch into waves that keep the order of each key.

Confirms of a pipelined batch arrive out of order, so two messages of one key must not be in flight together: if the first is
nacked and the second confirmed, their order is lost. The k-th message of every key belongs to the k-th *wave*. A wave is sent
after the broker has answered the previous one. Messages without a key have no order, and are all in the first wave.
"""

from collections.abc import Iterable

from outbox.store.claiming import RelayedMessage


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

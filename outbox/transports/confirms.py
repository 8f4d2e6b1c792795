"""Match publisher confirms to publishes.

The publisher confirms of AMQP 0-9-1 (RabbitMQ, "Consumer Acknowledgements and Publisher Confirms") name publishes by
delivery tag: 1, 2, 3… in the order they were sent on a channel. Acks arrive out of order, and one ack may cover many
messages. A returned message is named by its message id only and arrives before its own ack, so *returned* overrides *acked*.

This module uses no socket and no clock.
"""

from collections.abc import Collection, Iterable
from itertools import takewhile
from math import inf

from exactly_once.transport.interface import CONFIRMED, PublishOutcome, Verdict


class ConfirmTracker:
    """The publishes of one channel. A new channel needs a new tracker, because its tags restart at 1.

    Attributes:
        last_tag: of the last publish.
        answered: the number of publishes that were answered.
    """

    def __init__(self) -> None:
        self.last_tag = self.answered = 0
        self._open: dict[int, tuple[int, str, float]] = {}
        self._by_message_id: dict[str, int] = {}
        self._returned: dict[int, str] = {}
        self._settled: dict[int, Verdict] = {}

    @property
    def waiting(self) -> bool:
        return bool(self._open)

    def waits_behind(self, tag: int) -> bool:
        """Is a confirm of a publish after this tag outstanding?"""
        return next(reversed(self._open), 0) > tag

    @property
    def unanswered(self) -> list[int]:
        """The positions without a confirm, in the order of sending."""
        return [position for position, _, _ in self._open.values()]

    @property
    def awaited_since(self) -> float:
        """When the oldest publish that was `left` was; infinite if there is none."""
        return next((since for _, _, since in self._open.values()), inf)

    def left(self, at: float) -> None:
        """Record that nothing waits for the publishes without a confirm any more, from this instant on."""
        for tag, (position, message_id, since) in self._open.items():
            self._open[tag] = position, message_id, min(since, at)

    def forget(self, positions: Collection[int]) -> None:
        """Ignore the answers to the publishes of these positions, which are sent again, or are other messages by now."""
        for tag in [tag for tag, (position, _, _) in self._open.items() if position in positions]:
            self._closed([tag])

    def sent(self, position: int, message_id: str) -> None:
        """Record the message at `position` as the next publish of this channel."""
        self.last_tag += 1
        self._open[self.last_tag] = position, message_id, inf
        self._by_message_id[message_id] = position

    def returned(self, message_id: str, reason: str) -> None:
        position = self._by_message_id.get(message_id)
        if position is not None:
            self._returned[position] = reason

    def acked(self, tag: int, multiple: bool) -> None:
        positions = self._close(tag, multiple)
        self._settled.update(dict.fromkeys(positions, CONFIRMED))
        if self._returned:
            for position in self._returned.keys() & positions:
                self._settled[position] = Verdict(PublishOutcome.RETURNED, self._returned.pop(position))

    def nacked(self, tag: int, multiple: bool) -> None:
        for position in self._close(tag, multiple):
            self._settled[position] = Verdict(PublishOutcome.NACKED, "the broker refused it (basic.nack)")

    def collect(self) -> dict[int, Verdict]:
        """The verdicts since the last call, without the publishes that have no answer yet."""
        settled, self._settled = self._settled, {}
        return settled

    def _close(self, tag: int, multiple: bool) -> list[int]:
        # An unknown or repeated tag closes nothing. Tag 0 with `multiple` means "all so far".
        last = tag or self.last_tag
        return self._closed([*takewhile(last.__ge__, self._open)] if multiple else [tag])

    def _closed(self, tags: Iterable[int]) -> list[int]:
        closed = [self._open.pop(tag) for tag in tags if tag in self._open]
        for position, message_id, _ in closed:
            if self._by_message_id.get(message_id) == position:
                del self._by_message_id[message_id]
        self.answered += len(closed)
        return [position for position, _, _ in closed]

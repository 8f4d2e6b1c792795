"""What the broker has confirmed of what one channel has published."""

from __future__ import annotations

import amqp


class Unconfirmed:
    """Delivery tags without an answer, oldest first."""

    def __init__(self) -> None:
        self.tags: dict[int, None] = {}
        self.refused = 0

    def acked(self, tag: int, multiple: bool) -> None:
        if not multiple:
            self.tags.pop(tag, None)
            return
        confirmed = []
        for open_tag in self.tags:
            if open_tag > tag:
                break
            confirmed.append(open_tag)
        for open_tag in confirmed:
            del self.tags[open_tag]

    def nacked(self, tag: int, multiple: bool) -> None:
        self.refused += 1
        self.acked(tag, multiple)

    def returned(self, *_: object) -> None:
        self.refused += 1

    def listen(self, channel: amqp.Channel) -> None:
        """Switch on the confirms of the channel, and handle them."""
        channel.confirm_select()
        channel.events["basic_ack"].add(self.acked)
        channel.events["basic_nack"].add(self.nacked)
        channel.events["basic_return"].add(self.returned)

"""The past of new handlers, for a relay: it hands over the messages of the outbox's history, in the order of publishing.

A handler with `start_from="beginning"`, or an instant, receives nothing from its queue, where new messages wait, until its past
is stored. A relay of its database stores it, see `outbox.relay.starting`, which finds this module by its name.

The maximum message age does not apply to the past: a handler without messages has handled none, so none can have been purged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exactly_once.transport import OutgoingMessage, Sent
from inbox.conf import inbox_options
from inbox.consumer.topology import queue_name
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.local import LocalTransport
from inbox.receiving.past import waiting_among, wanting_on
from inbox.store import starts


def starts_on(alias: str, *, is_local: bool) -> Starts | None:
    """The starts on one database; None if no handler of this process wants its past from there."""
    return Starts(alias, is_local=is_local) if wanting_on(alias) else None


class Starts:
    """The starts of the handlers of this process on one database.

    Args:
        is_local: the relay hands new messages over, too, so that no queue has to exist before the past is read.
    """

    def __init__(self, alias: str, *, is_local: bool) -> None:
        self._alias = alias
        self._is_local = is_local
        self._transport = LocalTransport("local://", alias=alias, exchange="", is_past=True)

    def waiting(self) -> Sequence[str]:
        """The handlers of this process that wait for their past."""
        wanting = wanting_on(self._alias)
        if self._is_local:
            return sorted(waiting_among(self._alias, wanting))
        names = {handler.name for handler in wanting}
        return [name for name in starts.waiting(self._alias) if name in names]

    def lock(self, handler: str) -> Any | None:
        """Lock the start until the open transaction ends; None if another process has it, or it is complete."""
        return starts.lock(self._alias, handler)

    def queue_of(self, handler: str) -> str:
        """The name of its queue, for messages that only this handler gets."""
        return queue_name(registry.get(handler) or _unknown(handler), inbox_options())

    def topics_of(self, handler: str) -> Sequence[str]:
        return registry.topics_of(handler)

    def hand_over(self, messages: Sequence[OutgoingMessage], deadline: float) -> Sent:
        """Store messages in the open transaction."""
        return self._transport.send(messages, deadline)

    def update(self, start: Any, **columns: Any) -> None:
        starts.update(self._alias, start, **columns)


def _unknown(handler: str) -> Handler:
    raise LookupError(f"No handler of this process is called {handler!r}.")

"""The argument of a join's function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inbox.handlers.message import Message


@dataclass(frozen=True, kw_only=True)
class Join:
    """The messages of one run.

    Attributes:
        id: the same in every attempt; use it as the idempotency key of calls to other services.
        run_id: what the messages have in common.
        messages: by topic, in the order of `all_of`, those that have come.
        missing: the topics whose messages have not come, if an operator or `on_missing="call"` starts the run without them.
        attempt: the number of this attempt, counted from 1.
    """

    id: str
    run_id: str
    messages: Mapping[str, Message]
    missing: tuple[str, ...] = ()
    attempt: int = 1

    def __getitem__(self, topic: str) -> Message:
        """The message of a topic; raises KeyError if it has not come."""
        return self.messages[topic]

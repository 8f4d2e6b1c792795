"""A join: what it waits for, and the argument of its function."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from inbox.handlers.message import Message
from inbox.handlers.options import require_duration

TOPIC = "inbox.join"
"""The topic in the inbox rows of runs. No message is delivered for it."""


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


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What a join waits for.

    Attributes:
        name: of its handler.
        using: the database alias of its runs.
        topics: all of these.
        deadline: after the first arrival of a message of the run.
        on_missing: what happens then.
        refuses_late: a message that comes when the run is over is a dead letter. Otherwise it is stored with the run.

    Raises:
        TypeError: the deadline is not a timedelta.
        ValueError: a value is out of range.
    """

    name: str
    using: str
    topics: tuple[str, ...]
    deadline: timedelta
    on_missing: Literal["dead", "call"]
    refuses_late: bool = False

    def __post_init__(self) -> None:
        if not self.topics or len({*self.topics}) < len(self.topics):
            raise ValueError(f"all_of is {[*self.topics]}: a run has one message of each topic, so each may be listed once.")
        if TOPIC in self.topics:
            raise ValueError(f"all_of contains {TOPIC!r}, which is the topic of the runs themselves.")
        require_duration("deadline", self.deadline)
        if self.on_missing not in {"dead", "call"}:
            raise ValueError(f"on_missing is {self.on_missing!r}: it must be 'dead' or 'call'.")

    def missing(self, topics: Collection[str]) -> tuple[str, ...]:
        """Those of its topics that are not in `topics`."""
        return tuple(topic for topic in self.topics if topic not in topics)

    @property
    def collectors(self) -> dict[str, str]:
        """Its topics by the handlers that collect them."""
        return {f"{self.name}/{topic}": topic for topic in self.topics}

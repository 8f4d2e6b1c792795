"""The kinds of handlers: what differs in how their messages are run.

A handler has one kind, which is made when it is registered and answers for it. The order of a key is not a kind: messages that
are run in order may be run in a transaction, under a lease or by clients. With subclasses of `Handler` instead, each of these
would be a class, and every copy of a handler, such as one that a test observes, would have to be of its class.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from typing import Any

from inbox.handlers.message import Message
from inbox.handlers.options import DurationField, require_count


class Kind:
    """One message in one transaction.

    Attributes:
        size: the maximum number of messages in one transaction.
        wait: the longest wait for that many, counted from the first.
        given: returns the argument of the function for a call with these messages.
        gets_list: one call takes all messages of a transaction.
        has_queue: deliveries come to it. Other rows are stored by the inbox itself.
        is_called: processes call the function. Otherwise clients of `inbox.contrib.http` claim its stored messages.
        all_of: the topics that it joins. Their messages are stored by its collectors.
        collects_for: the join whose messages it stores, in READ COMMITTED transactions whatever the database's default;
            "": none.
        dead_letters_of: the handler whose dead letters it gets; "": none.
        never_ended: the usual reasons why an attempt never ends.
        why_not_dry: why a message cannot be run and rolled back; "" if it can.
    """

    size: int = 1
    wait: timedelta = timedelta()
    given: Callable[[Sequence[Message]], Any] = itemgetter(0)
    gets_list: bool = False
    has_queue: bool = True
    is_called: bool = True
    all_of: tuple[str, ...] = ()
    collects_for: str = ""
    dead_letters_of: str = ""
    never_ended: str = "its process died, or its database became unavailable"
    why_not_dry: str = ""

    def has_around(self, message: Message) -> bool:
        """Are the context managers of `INBOX["AROUND"]` entered for this message?"""
        return True


PLAIN = Kind()


@dataclass(frozen=True, kw_only=True)
class Group(Kind):
    """Several calls share one transaction."""

    size: int


@dataclass(frozen=True, kw_only=True)
class Batch(Kind):
    """The function gets a list of messages, in one transaction.

    Attributes:
        size: the maximum number of messages in a list.
        wait: the longest wait for a list to fill, counted from its first message.

    Raises:
        TypeError: `size` is not a whole number, or `wait` is neither a timedelta nor text.
        ValueError: `size` is less than 1, or `wait` is not longer than zero.
    """

    size: int = 100
    wait: DurationField[timedelta] = DurationField(timedelta(seconds=0.2))  # noqa: RUF009 - a descriptor
    given = list
    gets_list = True

    def __post_init__(self) -> None:
        require_count("size", self.size)


@dataclass(frozen=True, kw_only=True)
class Lease(Kind):
    """The function runs outside any transaction, for effects outside the database. Each message has one owner at a time.

    Attributes:
        duration: the time without a heartbeat after which another process may run the message. Heartbeats extend the lease.
        limit: the longest run. After that the lease is no longer extended.

    Raises:
        TypeError: one of them is neither a timedelta nor text.
        ValueError: one of them is not longer than zero, or `limit` is shorter than `duration`.
    """

    duration: DurationField[timedelta] = DurationField(timedelta(minutes=10))  # noqa: RUF009 - a descriptor
    limit: DurationField[timedelta] = DurationField(timedelta(hours=1))  # noqa: RUF009 - a descriptor
    never_ended = "the process died, or the lease store became unavailable"
    why_not_dry = "its handler runs under a lease, and effects outside the database cannot be rolled back"

    def __post_init__(self) -> None:
        if self.limit < self.duration:
            raise ValueError(f"limit is {self.limit}, shorter than duration, {self.duration}: make it at least as long.")


class Pulled(Kind):
    """The messages are stored, and clients claim them."""

    is_called = False
    never_ended = "no client acknowledged or released it before its lease ended"
    why_not_dry = "it is read over HTTP, so no handler of this project runs it"


@dataclass(frozen=True, kw_only=True)
class Joined(Kind):
    """The function gets what `given` makes of a message that stands for a run. See `inbox.contrib.joins`."""

    all_of: tuple[str, ...]
    given: Callable[[Sequence[Message]], Any]
    has_queue = False


@dataclass(frozen=True, kw_only=True)
class Collector(Kind):
    """The messages of one topic are stored for a join."""

    collects_for: str


@dataclass(frozen=True, kw_only=True)
class OnDead(Kind):
    """The function is called with each dead letter of another handler."""

    dead_letters_of: str
    has_queue = False
    why_not_dry = "it reports a dead letter: run that one"

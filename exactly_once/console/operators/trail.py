"""What a half knows of one message: its transitions, its present state and its place in a chain."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from exactly_once.sql.fields import value_of


@dataclass(frozen=True, kw_only=True)
class _Placed:
    """
    Attributes:
        where: "outbox", or the name of a handler.
        database: the alias under which it was found. What two aliases of one database share is counted once.
    """

    where: str
    database: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        return self.where if self.database == "default" else f"{self.where} ({self.database})"


@dataclass(frozen=True, kw_only=True)
class HistoryEvent(_Placed):
    """One transition of a message.

    Attributes:
        at: by the clock of the database that stores it.
        was, became: states; `was` is "" for the first moment, and if it was not recorded.
        process: the process that made the transition, `host:pid:thread`; "" if the row and not the trail shows it.
        reason: human-readable; "" if the states are explanation enough.
    """

    at: datetime
    was: str
    became: str
    process: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class PresentState(_Placed):
    """The present state of a message in one place, by its row.

    Attributes:
        attempts: the number of attempts so far.
        due: when the next automatic step is due; None if there is none.
        error: the latest, in full.
        also: further human-readable facts of its row.
        deferred: its handler deferred it, so its retry is not the consequence of a failure.
    """

    state: str
    topic: str
    biz_id: str
    attempts: int
    due: datetime | None = None
    error: str = ""
    also: str = ""
    deferred: bool = False


@dataclass(frozen=True, kw_only=True)
class PartOfHistory:
    """One app's data about a message in one database.

    Attributes:
        unknown: whole sentences about facts that the app cannot know.
        never_left: the app has the message and has certainly never sent it.
    """

    moments: Sequence[HistoryEvent] = ()
    standings: Sequence[PresentState] = ()
    unknown: Sequence[str] = ()
    never_left: bool = False


@dataclass(frozen=True, kw_only=True)
class ChainRow:
    """One message of a chain in one place: in the outbox, or in the inbox for one handler.

    Attributes:
        app: the package whose row it is, and `pk` its primary key there.
        where: see `HistoryEvent`.
        began_at: when the outbox stored it, or the handler received it; by the clock of `database`.
        settled_at: when the broker confirmed it, or its effect was committed; None if `state` is not a settled one.
        published_at: by the clock of the publisher, as the message says; None if it does not.
        is_publication: it is in the outbox.
    """

    app: str
    pk: int
    message_id: str
    correlation_id: str
    causation_id: str
    topic: str
    biz_id: str
    where: str
    state: str
    began_at: datetime
    settled_at: datetime | None
    published_at: datetime | None
    attempts: int
    error: str
    database: str = field(compare=False)
    is_publication: bool


class HistorySource(Protocol):
    """What a half knows of messages. The functions search one database, which has its tables.

    Attributes:
        NOT_HERE: a whole sentence: why it does not have a message.
    """

    NOT_HERE: str

    def part_of_history(self, alias: str, message_id: str) -> PartOfHistory: ...

    def ids_of(self, alias: str, topic: str, biz_id: str) -> Iterable[str]:
        """The ids of the messages with this topic and biz-id, oldest first."""

    def rows_of(self, alias: str, correlation_id: str, most: int) -> Sequence[ChainRow]:
        """Up to `most` rows of the messages with this correlation id, and of the message with this id."""

    def correlation_of(self, alias: str, message_id: str) -> str:
        """The correlation id of a message; "" if the app does not have the message."""


def moment_of(entry: Any, where: str, database: str) -> HistoryEvent:
    """The moment that an entry of a trail records."""
    return value_of(HistoryEvent, entry, where=where, database=database)

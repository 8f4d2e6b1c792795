"""The life of one message, merged from what every app of this process knows of it.

Each app that keeps messages registers a `Witness`. None of them knows the others: what joins their accounts is the message id,
which is the same from the transaction that published it to the last attempt of the last handler.

Nothing is guessed. What a trail or a row does not say is said to be unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from typing import Protocol, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One transition of a message.

    Attributes:
        at: by the clock of the database that it was written in.
        where: "outbox", or the name of a handler.
        was, became: states; `was` is "" at the beginning, and where it was not recorded.
        process: in whose hands, `host:pid:thread`; "" when it is known from the row and not from the trail.
        reason: for people; "" when the states say it.
        database: the alias that it was found in. The same moment, found by two aliases of one database, is one.
    """

    at: datetime
    where: str
    was: str
    became: str
    process: str = ""
    reason: str = ""
    database: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How a message stands now in one place, by its row.

    Attributes:
        where: see `Moment`.
        attempts: how many have been made.
        due: when it goes on by itself; None when it does not.
        error: the latest, in full.
        also: what else its row says, for people.
    """

    where: str
    state: str
    topic: str
    biz_id: str
    attempts: int
    due: datetime | None = None
    error: str = ""
    also: str = ""
    database: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one app knows of a message.

    Attributes:
        searched: where it looked, for people.
        unknown: what it cannot know, in whole sentences.
        elsewhere: why the message may be elsewhere, when it is not here.
        never_left: it has it, and has certainly never sent it.
    """

    searched: str
    moments: Sequence[Moment] = ()
    standings: Sequence[Standing] = ()
    unknown: Sequence[str] = ()
    elsewhere: str = ""
    never_left: bool = False


class Witness(Protocol):
    """An app that keeps messages. `aliases` are the databases to look in; None: all that have its tables."""

    def account_of(self, message_id: str, aliases: Collection[str] | None) -> Account: ...

    def ids_of(self, topic: str, biz_id: str, aliases: Collection[str] | None) -> list[str]:
        """The messages with this business name, the first one first."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """Everything that is known of one message.

    Attributes:
        moments: in the order of time.
        namesakes: ids of other messages with the same topic and biz-id. Each handler runs only one of them.
    """

    message_id: str
    moments: Sequence[Moment]
    standings: Sequence[Standing]
    unknown: Sequence[str]
    searched: Sequence[str]
    namesakes: Sequence[str] = ()

    @property
    def is_known(self) -> bool:
        return bool(self.moments or self.standings)


_witnesses: dict[str, Witness] = {}


def register(app: str, witness: Witness) -> None:
    """Have this app asked, too. It is called when Django is ready; a second call for an app replaces the first."""
    _witnesses[app] = witness


def apps_asked() -> list[str]:
    """The apps that were registered."""
    return list(_witnesses)


def life_of(message_id: str, aliases: Collection[str] | None = None) -> Life:
    """Everything that the apps of this process know of a message, in the order of time.

    Args:
        message_id: as the broker has it.
        aliases: the databases to look in; None: all that have the tables.
    """
    accounts = [witness.account_of(message_id, aliases) for witness in _witnesses.values()]
    standings = _once(standing for account in accounts for standing in account.standings)
    never_left = any(account.never_left for account in accounts)
    return Life(
        message_id=message_id,
        # The sort is stable, so that what has one instant stays in the order in which it was written.
        moments=sorted(_once(moment for account in accounts for moment in account.moments), key=attrgetter("at")),
        standings=standings,
        unknown=_once(words for account in accounts for words in _unknown(account, never_left=never_left)),
        searched=[account.searched for account in accounts],
        namesakes=[
            other
            for topic, biz_id in _once((standing.topic, standing.biz_id) for standing in standings)
            for other in ids_of(topic, biz_id, aliases)
            if other != message_id
        ],
    )


def ids_of(topic: str, biz_id: str, aliases: Collection[str] | None = None) -> list[str]:
    """The ids of the messages with this business name, in any app; see `life_of`."""
    return _once(found for witness in _witnesses.values() for found in witness.ids_of(topic, biz_id, aliases))


def _unknown(account: Account, *, never_left: bool) -> Sequence[str]:
    """Where a message that was never sent may be need not be said."""
    return [*account.unknown, account.elsewhere] if account.elsewhere and not never_left else account.unknown


def _once(items: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(items))

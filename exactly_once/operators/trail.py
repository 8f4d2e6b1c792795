"""The history of one message, merged from the data of every app of this process.

Each app that stores messages registers a `Witness`. Witnesses are independent of each other. Their accounts are merged by the
message id, which is the same from the publishing transaction to the last attempt of the last handler.

Nothing is guessed. Facts that neither a trail nor a row contains are reported as unknown.
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
        at: by the clock of the database that stores it.
        where: "outbox", or the name of a handler.
        was, became: states; `was` is "" for the first moment, and if it was not recorded.
        process: the process that made the transition, `host:pid:thread`; "" if the row and not the trail shows it.
        reason: human-readable; "" if the states are explanation enough.
        database: the alias under which it was found. Moments that two aliases of one database share are counted once.
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
    """The present state of a message in one place, by its row.

    Attributes:
        where: see `Moment`.
        attempts: the number of attempts so far.
        due: when the next automatic step is due; None if there is none.
        error: the latest, in full.
        also: further human-readable facts of its row.
        deferred: its handler deferred it, so its retry is not the consequence of a failure.
    """

    where: str
    state: str
    topic: str
    biz_id: str
    attempts: int
    due: datetime | None = None
    error: str = ""
    also: str = ""
    deferred: bool = False
    database: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class Account:
    """One app's data about a message.

    Attributes:
        searched: human-readable: where the app searched.
        unknown: whole sentences about facts that the app cannot know.
        elsewhere: why the message may be elsewhere, if the app does not have it.
        never_left: the app has the message and has certainly never sent it.
    """

    searched: str
    moments: Sequence[Moment] = ()
    standings: Sequence[Standing] = ()
    unknown: Sequence[str] = ()
    elsewhere: str = ""
    never_left: bool = False


class Witness(Protocol):
    """An app that stores messages. `aliases` are the databases to search; None: all that have its tables."""

    def account_of(self, message_id: str, aliases: Collection[str] | None) -> Account: ...

    def ids_of(self, topic: str, biz_id: str, aliases: Collection[str] | None) -> list[str]:
        """The ids of the messages with this topic and biz-id, oldest first."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """Everything that is known about one message.

    Attributes:
        moments: in order of time.
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
    """Register the witness of an app, when Django is ready. A second call for an app replaces the first."""
    _witnesses[app] = witness


def apps_asked() -> list[str]:
    """The registered apps."""
    return list(_witnesses)


def life_of(message_id: str, aliases: Collection[str] | None = None) -> Life:
    """Everything that the apps of this process know about a message, in order of time.

    Args:
        message_id: as on the wire.
        aliases: the databases to search; None: all that have the tables.
    """
    accounts = [witness.account_of(message_id, aliases) for witness in _witnesses.values()]
    standings = _once(standing for account in accounts for standing in account.standings)
    never_left = any(account.never_left for account in accounts)
    return Life(
        message_id=message_id,
        # The sort is stable, so moments of the same instant stay in the order of writing.
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
    """The ids of the messages with this topic and biz-id, in any app; see `life_of`."""
    return _once(found for witness in _witnesses.values() for found in witness.ids_of(topic, biz_id, aliases))


def _unknown(account: Account, *, never_left: bool) -> Sequence[str]:
    """Omit `elsewhere` for a message that was never sent."""
    return [*account.unknown, account.elsewhere] if account.elsewhere and not never_left else account.unknown


def _once(items: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(items))

"""The history of one message, merged from the data of every app of this process.

The `HistorySource` of each half is independent of the others. Their parts are merged by the message id, which is the same from
the publishing transaction to the last attempt of the last handler.

Nothing is guessed. Facts that neither a trail nor a row contains are reported as unknown.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import TypeVar

from exactly_once.console.operators.trail import ChainRow, HistoryEvent, HistorySource, PartOfHistory, PresentState
from exactly_once.half import halves
from exactly_once.sql.connections import with_table

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class ChainedMessage:
    """A message of a chain.

    Attributes:
        depth: number of messages above it in the tree.
        publication: its row in the outbox; None if it is not there.
        effects: its rows in the inbox, one for each handler, in order of time.
        elsewhere: the id of the message that caused it, if that one is not in the tree; "" if it is, or there is none.
    """

    message_id: str
    depth: int
    publication: ChainRow | None
    effects: Sequence[ChainRow]
    elsewhere: str

    @property
    def first(self) -> ChainRow:
        return self.publication or self.effects[0]

    @property
    def published_at(self) -> datetime:
        return self.first.published_at or self.first.began_at


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The messages with one correlation id, as a tree from each cause to what its handlers published.

    Attributes:
        messages: each is followed by the messages that it caused.
        is_cut: there are more rows than were read.
        unavailable: databases that could not be searched.
    """

    correlation_id: str
    messages: Sequence[ChainedMessage]
    is_cut: bool
    unavailable: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class MessageHistory:
    """Everything that is known about one message.

    Attributes:
        moments: in order of time.
        namesakes: ids of other messages with the same topic and biz-id. Each handler runs only one of them.
    """

    message_id: str
    moments: Sequence[HistoryEvent]
    standings: Sequence[PresentState]
    unknown: Sequence[str]
    namesakes: Sequence[str] = ()

    @property
    def is_known(self) -> bool:
        return bool(self.moments or self.standings)


def history_of(message_id: str, aliases: Collection[str] | None = None) -> MessageHistory:
    """Everything that the apps of this process know about a message, in order of time.

    Args:
        message_id: as on the wire.
        aliases: the databases to search; None: all that have the tables.
    """
    parts: list[PartOfHistory] = []
    unknown: list[str] = []
    not_here: list[str] = []
    for half in halves():
        available, unavailable = with_table(half.entries, aliases)
        found = [half.trail.part_of_history(alias, message_id) for alias in available]
        parts += found
        unknown += [f"The database {alias!r} is unavailable and may have more entries." for alias in unavailable]
        unknown += [words for part in found for words in part.unknown]
        not_here += [] if any(part.moments for part in found) else [half.trail.NOT_HERE]
    if not any(part.never_left for part in parts):
        unknown += not_here
    standings = _once(standing for part in parts for standing in part.standings)
    return MessageHistory(
        message_id=message_id,
        # The sort is stable, so moments of the same instant stay in the order of writing.
        moments=sorted(_once(moment for part in parts for moment in part.moments), key=attrgetter("at")),
        standings=standings,
        unknown=_once(unknown),
        namesakes=[
            other
            for topic, biz_id in _once((standing.topic, standing.biz_id) for standing in standings)
            for other in ids_of(topic, biz_id, aliases)
            if other != message_id
        ],
    )


def searched(aliases: Collection[str] | None = None) -> str:
    """Where `history_of` and `ids_of` search: the apps, with the databases that have their tables."""
    where = {half.app: with_table(half.entries, aliases)[0] for half in halves()}
    return "; ".join(f"the {app} ({', '.join(found) or 'no database has its tables'})" for app, found in where.items())


def ids_of(topic: str, biz_id: str, aliases: Collection[str] | None = None) -> list[str]:
    """The ids of the messages with this topic and biz-id, in any app; see `history_of`."""
    return _once(
        found
        for half in halves()
        for alias in with_table(half.entries, aliases)[0]
        for found in half.trail.ids_of(alias, topic, biz_id)
    )


MOST_ROWS = 500
"""Rows of one app and database in a chain."""


def chain_of(name: str, apps: Collection[str] | None = None) -> Chain:
    """The chain that a message belongs to.

    Args:
        name: the message's id, or a correlation id.
        apps: those to ask; None: all.
    """
    places: list[tuple[HistorySource, str]] = []
    unavailable: list[str] = []
    for half in halves():
        if apps is None or half.app in apps:
            available, others = with_table(half.entries)
            places += [(half.trail, alias) for alias in available]
            unavailable += others
    correlation_id = next(filter(None, (source.correlation_of(alias, name) for source, alias in places)), name)
    found = [source.rows_of(alias, correlation_id, MOST_ROWS + 1) for source, alias in places]
    rows = _once(row for part in found for row in part[:MOST_ROWS])
    return Chain(
        correlation_id=correlation_id,
        messages=_as_tree(sorted(rows, key=attrgetter("began_at"))),
        is_cut=any(len(part) > MOST_ROWS for part in found),
        unavailable=_once(unavailable),
    )


def _as_tree(found: Sequence[ChainRow]) -> list[ChainedMessage]:
    """The messages of these rows, which are in order of time; each is followed by those that it caused."""
    by_id: dict[str, list[ChainRow]] = {}
    for row in found:
        by_id.setdefault(row.message_id, []).append(row)
    caused: dict[str, list[str]] = {}
    for message_id, rows in by_id.items():
        caused.setdefault(rows[0].causation_id, []).append(message_id)
    tree: dict[str, ChainedMessage] = {}
    # Those whose cause is not here come first. A message that a hostile producer has made its own cause follows as a root, too.
    roots = [message_id for message_id, rows in by_id.items() if rows[0].causation_id not in by_id]
    for root in (*roots, *by_id):
        # Not by recursion: a chain may be as long as there are rows.
        pending = [(root, 0)]
        while pending:
            message_id, depth = pending.pop()
            if message_id in tree:
                continue
            rows = by_id[message_id]
            tree[message_id] = ChainedMessage(
                message_id=message_id,
                depth=depth,
                publication=next((row for row in rows if row.is_publication), None),
                effects=[row for row in rows if not row.is_publication],
                elsewhere=rows[0].causation_id if depth == 0 and rows[0].causation_id not in by_id else "",
            )
            pending += [(child, depth + 1) for child in reversed(caused.get(message_id, ()))]
    return list(tree.values())


def _once(items: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(items))

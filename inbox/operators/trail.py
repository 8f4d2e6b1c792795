"""The history of one message in the inbox: its trail in every handler, and the data of its rows."""

from collections.abc import Iterator, Sequence
from operator import attrgetter

from django.db import connections
from django.db.models import QuerySet

from exactly_once.console.operators.trail import ChainRow, HistoryEvent, PartOfHistory, PresentState, moment_of
from exactly_once.failures import DEFERRED
from exactly_once.process.clock import utcnow
from exactly_once.sql.fields import value_of
from exactly_once.wire.identity import uuid_in
from inbox.conf import inbox_options
from inbox.models import CHAINED, InboxMessage, TrailEntry
from inbox.states import DUE, State
from inbox.store.dialect import RECEIPTS

NOT_HERE = (
    "No handler of this project has it: none handles its topic, it has not arrived, another message of its biz-id came first, "
    "or its row has been purged."
)
_LARGE = ("body", "headers", "traceback", "conflicting_body", "result")


def part_of_history(alias: str, message_id: str) -> PartOfHistory:
    """See `console.operators.trail`. Without a trail, the rows give the first transition and, once settled, the last one."""
    # If the payload of a message was corrected, its handler has several rows, and each replaces the one before.
    chains: dict[str, list[InboxMessage]] = {}
    for row in _rows(alias, message_id):
        chains.setdefault(row.handler, []).append(row)
    trails: dict[str, list[TrailEntry]] = {handler: [] for handler in chains}
    for entry in TrailEntry.objects.using(alias).filter(message_id__in=_spellings(message_id)).order_by("pk"):
        trails.setdefault(entry.handler, []).append(entry)
    rows = sorted((row for chain in chains.values() for row in chain), key=attrgetter("pk"))
    unknown = [f"The row of {handler} has been purged; only its trail remains." for handler in trails if handler not in chains]
    kept_since = utcnow() - inbox_options().TRAIL_RETENTION
    if any(row.received_at < kept_since for row in rows):
        unknown.append(f"Trail entries of its handlers from before {kept_since:%Y-%m-%d} may have been purged.")
    return PartOfHistory(
        moments=[
            moment for handler, trail in trails.items() for moment in _moments(alias, handler, chains.get(handler, []), trail)
        ],
        standings=[_standing(alias, row) for row in rows],
        unknown=unknown,
    )


def ids_of(alias: str, topic: str, biz_id: str) -> list[str]:
    """See `console.operators.trail`. Handler by handler, because the index of biz-ids begins with the handler."""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"WITH RECURSIVE handlers(name) AS (SELECT (SELECT min(handler) FROM {RECEIPTS}) UNION ALL "
            f"SELECT (SELECT min(r.handler) FROM {RECEIPTS} r WHERE r.handler > handlers.name) FROM handlers "
            "WHERE handlers.name IS NOT NULL) SELECT r.message_id FROM handlers "
            f"JOIN {RECEIPTS} r ON r.handler = handlers.name AND r.topic = %s AND r.biz_id = %s "
            "WHERE r.message_id <> '' ORDER BY r.id",
            [topic, biz_id],
        )
        return [message_id for (message_id,) in cursor.fetchall()]


def rows_of(alias: str, correlation_id: str, most: int) -> list[ChainRow]:
    """See `console.operators.trail`. The first message of a chain has the chain's correlation id as its own id."""
    rows = list(_rows(alias, correlation_id)[:most])
    chained = InboxMessage.objects.using(alias).filter(CHAINED, correlation_id=correlation_id)
    rows += chained.defer(*_LARGE).order_by("id")[: most - len(rows)]
    return [
        value_of(
            ChainRow,
            row,
            app="inbox",
            is_publication=False,
            where=row.handler,
            began_at=row.received_at,
            published_at=row.created_at,
            error=row.last_error,
            database=alias,
        )
        for row in rows
    ]


def correlation_of(alias: str, message_id: str) -> str:
    """See `console.operators.trail`."""
    row = _rows(alias, message_id).first()
    return (row.correlation_id or row.message_id) if row else ""


def _rows(alias: str, message_id: str) -> QuerySet[InboxMessage]:
    rows = InboxMessage.objects.using(alias).filter(message_id__in=_spellings(message_id))
    return rows.defer(*_LARGE).order_by("pk")


def _spellings(message_id: str) -> set[str]:
    """The given id and its normal form, which this project uses. A message without an id cannot be searched."""
    return {message_id, str(uuid_in(message_id) or message_id)} - {""}


def _moments(alias: str, handler: str, chain: Sequence[InboxMessage], entries: Sequence[TrailEntry]) -> Iterator[HistoryEvent]:
    if chain and chain[0].replaces_id is None and not (entries and entries[0].was == ""):
        yield HistoryEvent(at=chain[0].received_at, where=handler, was="", became=State.RECEIVED.value, database=alias)
    yield from (moment_of(entry, handler, alias) for entry in entries)
    row = chain[-1] if chain else None
    if row is None or row.settled_at is None or (entries and entries[-1].became == row.state):
        return
    was = entries[-1].became if entries else State.RECEIVED.value
    yield HistoryEvent(at=row.settled_at, where=handler, was=was, became=row.state, database=alias)


def _standing(alias: str, row: InboxMessage) -> PresentState:
    also = [
        f"replaces row {row.replaces_id}, with a corrected payload" if row.replaces_id else "",
        f"in the order of key {row.key!r}" if row.ordered else "",
        f"duplicates suppressed: {row.duplicates:,}" if row.duplicates else "",
        "held back by the maximum message age" if row.quarantined else "",
    ]
    return value_of(
        PresentState,
        row,
        where=row.handler,
        due=row.next_attempt_at if row.state in DUE else None,
        error=row.last_error,
        also=", ".join(filter(None, also)),
        deferred=row.state == State.RETRYING and row.error_class == DEFERRED,
        database=alias,
    )

"""What the outbox knows of a message: its history, from its trail and its row, and the messages that it causes."""

from collections.abc import Callable, Iterator, Sequence

from django.db.models import Max

from exactly_once.console.operators.trail import ChainRow, HistoryEvent, PartOfHistory, PresentState, moment_of
from exactly_once.half import WouldPublish
from exactly_once.process.clock import utcnow
from exactly_once.sql.connections import with_table
from exactly_once.sql.days import LIVE
from exactly_once.sql.fields import value_of
from exactly_once.wire.envelope import JSON
from exactly_once.wire.identity import uuid_in
from outbox.conf import outbox_options
from outbox.models import CHAINED, OutboxMessage, TrailEntry
from outbox.states import State
from outbox.store.selecting import identified

NOT_HERE = "It is not in the outbox: it was published elsewhere, or its row and its trail have been purged."
_HERE = "outbox"
_OF_A_CHAIN = (
    *("message_id", "correlation_id", "causation_id", "topic", "biz_id"),
    *("state", "created_at", "settled_at", "attempts", "last_error"),
)
_GOES_ON = (State.SCHEDULED, State.RETRYING, State.PREPARED)
"""States with an automatic next step, due at the row's `available_at`."""
_NEVER_SENT = (State.PREPARED, State.STUCK, State.ROLLED_BACK)
"""States that no message enters after a relay has claimed it. A cancelled message, for example, may have been sent before."""
_MOST = 100


def part_of_history(alias: str, message_id: str) -> PartOfHistory:
    """See `console.operators.trail`. Without trail entries the row gives the first and, once settled, the last moment."""
    if (name := uuid_in(message_id)) is None:  # the outbox's ids are UUIDs
        return PartOfHistory()
    row = identified(alias, [name]).defer("body", "headers", "wire").first()
    entries = list(TrailEntry.objects.using(alias).filter(message_id=name).order_by("pk"))
    unknown = []
    kept_since = utcnow() - outbox_options().TRAIL_RETENTION
    if row is not None and row.created_at < kept_since:
        unknown.append(f"What happened to it in the outbox before {kept_since:%Y-%m-%d} may be purged.")
    if row is None and entries:
        unknown.append("Its row in the outbox has been purged; only its trail is left.")
    return PartOfHistory(
        moments=list(_moments(alias, row, entries)),
        standings=[] if row is None else [_standing(alias, row)],
        unknown=unknown,
        never_left=row is not None and row.state in _NEVER_SENT,
    )


def ids_of(alias: str, topic: str, biz_id: str) -> list[str]:
    """See `console.operators.trail`."""
    rows = OutboxMessage.objects.using(alias).filter(topic=topic, biz_id=biz_id).order_by("pk")
    return [str(message_id) for message_id in rows.values_list("message_id", flat=True)]


def rows_of(alias: str, correlation_id: str, most: int) -> list[ChainRow]:
    """See `console.operators.trail`. The first message of a chain has the chain's correlation id as its own id."""
    rows, name = OutboxMessage.objects.using(alias).only(*_OF_A_CHAIN), uuid_in(correlation_id)
    found = [] if name is None else list(rows.filter(message_id=name))
    found += rows.filter(CHAINED, correlation_id=correlation_id).order_by("id")[: most - len(found)]
    return [
        value_of(
            ChainRow,
            row,
            app="outbox",
            is_publication=True,
            message_id=str(row.message_id),
            where=_HERE,
            began_at=row.created_at,
            published_at=row.created_at,
            error=row.last_error,
            database=alias,
        )
        for row in found
    ]


def correlation_of(alias: str, message_id: str) -> str:
    """See `console.operators.trail`."""
    if (name := uuid_in(message_id)) is None:
        return ""
    return identified(alias, [name]).values_list("correlation_id", flat=True).first() or ""


def _moments(alias: str, row: OutboxMessage | None, entries: Sequence[TrailEntry]) -> Iterator[HistoryEvent]:
    if row is not None and not (entries and entries[0].was == ""):
        yield HistoryEvent(at=row.created_at, where=_HERE, was="", became=_began_as(row, entries), database=alias)
    yield from (moment_of(entry, _HERE, alias) for entry in entries)
    if row is None or row.settled_at is None or (entries and entries[-1].became == row.state):
        return
    # Only a ready message becomes published. For other states the previous state was not recorded.
    was = State.READY.value if row.state == State.PUBLISHED else ""
    yield HistoryEvent(at=row.settled_at, where=_HERE, was=was, became=row.state, database=alias)


def _began_as(row: OutboxMessage, entries: Sequence[TrailEntry]) -> str:
    first = entries[0].was if entries else row.state
    if first in {State.PREPARED, State.STUCK, State.ROLLED_BACK}:
        return State.PREPARED.value
    if first == State.SCHEDULED or (row.deliver_at is not None and not entries):
        return State.SCHEDULED.value
    # It has had `deliver_at` from the beginning, unless a transition in the trail set it.
    given_before = row.deliver_at is not None and row.deliver_at <= entries[0].at if entries else False
    if given_before and entries[0].became not in {State.SCHEDULED, State.READY}:
        return State.SCHEDULED.value
    return State.READY.value


def _standing(alias: str, row: OutboxMessage) -> PresentState:
    return PresentState(
        where=_HERE,
        state=row.state,
        topic=row.topic,
        biz_id=row.biz_id,
        attempts=row.attempts,
        due=row.available_at if row.state in _GOES_ON else None,
        error=row.last_error,
        also=f"in the order of key {row.key!r}" if row.key else "",
        database=alias,
    )


def published_from_now(alias: str) -> Callable[[str], Sequence[WouldPublish]]:
    """Returns the messages with a later position than the last one now, caused by a message; none without an outbox there."""
    if not with_table(OutboxMessage, [alias])[0]:
        return lambda causation_id: ()
    live = OutboxMessage.objects.using(alias).filter(day=LIVE)
    last = live.aggregate(last=Max("pk"))["last"] or 0

    def since(causation_id: str) -> Sequence[WouldPublish]:
        return [
            WouldPublish(
                topic=row.topic, biz_id=row.biz_id, key=row.key, body=bytes(row.body), content_type=JSON, headers=row.headers
            )
            for row in live.filter(pk__gt=last, causation_id=causation_id).order_by("pk")[:_MOST]
        ]

    return since

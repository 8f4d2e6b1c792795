"""Paused topics: a row for each, which all relays share, and the messages that become `paused` and `ready` again.

A pass reads which topics are paused before it claims messages, so before it makes some `paused` it locks the row of their topic
(KEY SHARE) and looks once more. Only a relay deletes such a row, under a lock that the other excludes, when it has seen in a
statement of its own that no message of the topic is paused. So no message stays `paused` without the row. An operator's
transaction changes rows and never deletes one; it holds up no pass, however long it is open.

Nobody waits for a lock here, except an operator: what is locked is tried again in the relay's next round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from django.db import OperationalError, connections, transaction
from django.db.models import BooleanField, Count, ExpressionWrapper, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce

from outbox.database.connections import is_postgresql, lock_timeout
from outbox.database.faults import is_collision
from outbox.database.now import DatabaseTime, now, now_after
from outbox.kernel.refused_rows import RefusedRows
from outbox.kernel.text import ERROR_LENGTH, printable
from outbox.models import OutboxMessage, PausedTopic
from outbox.states import LIVE, PAUSE, RESUME, State
from outbox.store.claiming import SECONDARY
from outbox.store.dialect import PAUSED_TOPICS, each_topic, live
from outbox.store.halving import change_others
from outbox.store.transitions import count_moved

_A_MOMENT = timedelta(milliseconds=100)
_FIRST_RESUMED = 10
"""Messages of the first batch that is resumed. Each following one is twice as large: a queue that takes a few messages and is
full again costs few of them an attempt."""
_MOST_RESUMED = 500
_AT_LEAST_EVERY = timedelta(seconds=10)
"""A batch is resumed although much of the last one is still ready, which may be because its rows cannot be changed."""
_ALL_BUT_ITS_TOPIC = ("paused_by", "reason", "paused_at", "probe_at", "pause_seconds", "in_trial", "is_resuming")
_STRANDED = "Messages were paused, and their topic was not."


class FoundTopic(NamedTuple):
    """How a topic was found when an operator changed it.

    Attributes:
        paused_by: who had paused it; "" for the circuit breaker.
    """

    paused_by: str
    is_resuming: bool


def pause_in_hand(alias: str, positions: Mapping[str, Sequence[int]]) -> int:
    """ready → paused for messages in hand, of topics that are still paused; how many. Inside the claim.

    Args:
        positions: by topic.
    """
    if not positions:
        return 0
    connection = connections[alias]
    among = f"topic IN ({', '.join(['%s'] * len(positions))})"
    lock = "FOR KEY SHARE SKIP LOCKED" if is_postgresql(connection) else ""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT topic FROM {PAUSED_TOPICS} WHERE NOT is_resuming AND {among} {lock}", list(positions))
        paused = [position for (topic,) in cursor.fetchall() for position in positions[topic]]
    return count_moved(alias, PAUSE, paused)


def pause_refused(alias: str, topic: str, reason: str, seconds: float, probe_after: timedelta) -> bool:
    """Pause a topic because the broker refuses it. False: it is paused already, or another transaction is changing that."""
    connection = connections[alias]
    instant = now(connection)
    given: list[Any] = [topic, printable(reason, ERROR_LENGTH), probe_after.total_seconds(), seconds]
    try:
        with transaction.atomic(using=alias), lock_timeout(alias, _A_MOMENT), connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {PAUSED_TOPICS} (topic, {', '.join(_ALL_BUT_ITS_TOPIC)}) "
                f"VALUES (%s, '', %s, {instant}, {now_after(connection)}, %s, '[]', false) "
                "ON CONFLICT (topic) DO UPDATE SET paused_by = '', reason = EXCLUDED.reason, paused_at = EXCLUDED.paused_at, "
                "probe_at = EXCLUDED.probe_at, pause_seconds = EXCLUDED.pause_seconds, in_trial = '[]', is_resuming = false "
                f"WHERE {PAUSED_TOPICS}.is_resuming RETURNING id",
                given,
            )
            return cursor.fetchone() is not None
    except OperationalError as error:
        if not is_collision(error):
            raise
        return False


def begin_trial(alias: str, topic: str, most: int, next_after: float, refused: RefusedRows | None = None) -> int:
    """paused → ready for the `most` oldest messages of a topic whose time to be tried has come; how many.

    Their positions are in its row, so that whichever relay has their shards sends them. A topic of which nothing is left is
    paused no longer.

    Args:
        next_after: the next ones are tried so many times the length of the pause from now, if nobody has said by then what
            became of these.
        refused: the rows that the database refuses to change. They are left out, and the others are changed; None raises.
    """
    with transaction.atomic(using=alias):
        row = _locked(alias, topic, paused_by="", is_resuming=False, probe_at__lte=DatabaseTime())
        if row is None:
            return 0
        positions = _oldest_paused(alias, topic, most, refused)
        if not (positions or _has_open(alias, row)):
            row.delete(using=alias)
            return 0
        _rows(alias, topic).update(in_trial=positions, probe_at=DatabaseTime(timedelta(seconds=next_after * row.pause_seconds)))
        return _resumed(alias, positions, refused)


def prolong(alias: str, topic: str, reason: str, longest: float, next_after: float) -> str | None:
    """The messages that were tried are refused: pause their topic twice as long, `longest` seconds at most.

    Once for each trial, however many relays had messages of it. Returns the reason until now; None when another relay has done
    it, or nothing was tried.
    """
    with transaction.atomic(using=alias):
        row = _locked(alias, topic, paused_by="", is_resuming=False)
        if row is None or not row.in_trial:
            return None
        seconds = min(2 * row.pause_seconds, longest)
        _rows(alias, topic).update(
            reason=printable(reason, ERROR_LENGTH),
            in_trial=[],
            pause_seconds=seconds,
            probe_at=DatabaseTime(timedelta(seconds=next_after * seconds)),
        )
        return str(row.reason)


def begin_resuming(alias: str, topic: str) -> bool:
    """The broker takes messages of a refused topic again. False: it was not paused by the circuit breaker, or is locked."""
    with transaction.atomic(using=alias):
        row = _locked(alias, topic, paused_by="", is_resuming=False)
        if row is None:
            return False
        _begin_resuming(alias, topic)
        return True


def resume_some(alias: str, topic: str, most: int, refused: RefusedRows | None = None) -> int:
    """paused → ready for the next batch of a topic that is resumed, the oldest first; how many.

    Not before half of the last batch has left: what other topics have ready is sent between them. The topic is paused no longer
    when none of its messages is.

    Args:
        refused: see `begin_trial`.
    """
    with transaction.atomic(using=alias):
        row = _locked(alias, topic, is_resuming=True)
        if row is None:
            return 0
        is_late = row.probe_at is None or row.is_late
        if not is_late and 2 * _ready(alias, row.in_trial) > len(row.in_trial):
            return 0
        size = min(max(_FIRST_RESUMED, 2 * len(row.in_trial)), _MOST_RESUMED, most)
        if positions := _oldest_paused(alias, topic, size, refused):
            _rows(alias, topic).update(in_trial=positions, probe_at=DatabaseTime(_AT_LEAST_EVERY))
            return _resumed(alias, positions, refused)
        if not _has(alias, topic, State.PAUSED):
            row.delete(using=alias)
        return 0


def resume_stranded(alias: str) -> list[str]:
    """Begin to resume topics of which messages are `paused` and which are not; somebody has deleted their rows. Which."""
    connection = connections[alias]
    paused = each_topic(f"{live(connection)} m WHERE m.state = 'paused'")
    with connection.cursor() as cursor:
        cursor.execute(f"{paused} AND NOT EXISTS (SELECT 1 FROM {PAUSED_TOPICS} p WHERE p.topic = name)")
        stranded = [name for (name,) in cursor.fetchall()]
    rows = [PausedTopic(topic=topic, reason=_STRANDED, paused_at=DatabaseTime(), is_resuming=True) for topic in stranded]
    PausedTopic.objects.using(alias).bulk_create(rows, ignore_conflicts=True)
    return stranded


def paused_topics(alias: str) -> QuerySet[PausedTopic]:
    """The paused topics, with how many `messages` of each are paused."""
    of_it = OutboxMessage.objects.filter(day=LIVE, topic=OuterRef("topic"), state=State.PAUSED).order_by()
    counted = Subquery(of_it.values("topic").annotate(messages=Count("pk")).values("messages"))
    rows = PausedTopic.objects.using(alias).annotate(messages=Coalesce(counted, 0), database_now=DatabaseTime())
    return rows.order_by("topic")


def pause_topic(alias: str, topic: str, by: str, reason: str) -> FoundTopic | None:
    """Pause a topic because a person says so; how it was found, None when it was not paused. In the open transaction."""
    found = _found(alias, topic)
    row = PausedTopic(topic=topic, paused_by=by, reason=printable(reason, ERROR_LENGTH), paused_at=DatabaseTime())
    # Over what the circuit breaker may have written in between.
    PausedTopic.objects.using(alias).bulk_create(
        [row], update_conflicts=True, unique_fields=["topic"], update_fields=_ALL_BUT_ITS_TOPIC
    )
    return found


def resume_topic(alias: str, topic: str) -> FoundTopic | None:
    """Begin to resume a topic, whoever has paused it; how it was found, None when it was not. In the open transaction."""
    found = _found(alias, topic)
    if found and not found.is_resuming:
        _begin_resuming(alias, topic)
    return found


def _begin_resuming(alias: str, topic: str) -> None:
    _rows(alias, topic).update(is_resuming=True, in_trial=[], probe_at=None, pause_seconds=0.0)


def _found(alias: str, topic: str) -> FoundTopic | None:
    row = _rows(alias, topic).select_for_update(no_key=True).first()
    return None if row is None else FoundTopic(row.paused_by, row.is_resuming)


def _locked(alias: str, topic: str, **conditions: Any) -> Any:
    """The row of the topic, if it meets the conditions and no other transaction has it."""
    is_late = ExpressionWrapper(Q(probe_at__lte=DatabaseTime()), output_field=BooleanField())
    rows = _rows(alias, topic).filter(**conditions).annotate(is_late=is_late)
    return rows.select_for_update(skip_locked=True).first()


def _oldest_paused(alias: str, topic: str, most: int, refused: RefusedRows | None) -> list[int]:
    paused = _of(alias, topic).filter(state=State.PAUSED).order_by("pk")
    if refused is not None and (skipped := refused.skipped()):
        paused = paused.exclude(pk__in=list(skipped))
    return list(paused.select_for_update(no_key=True, skip_locked=True).values_list("pk", flat=True)[:most])


def _resumed(alias: str, positions: Sequence[int], refused: RefusedRows | None) -> int:
    if not positions or refused is None:
        return count_moved(alias, RESUME, positions)
    return change_others(alias, positions, lambda some: count_moved(alias, RESUME, some), refused).changed


def _ready(alias: str, positions: Sequence[int]) -> int:
    return OutboxMessage.objects.using(alias).filter(day=LIVE, pk__in=positions, state=State.READY).count()


def _has_open(alias: str, row: PausedTopic) -> bool:
    """Is there a message of the topic that is being tried, is to be tried again, or was and is not `paused` yet?"""
    if _ready(alias, row.in_trial) or _has(alias, row.topic, State.RETRYING) or _has(alias, row.topic, State.PAUSED):
        return True
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT 1 FROM {live(connections[alias])} m WHERE {SECONDARY} AND m.topic = %s LIMIT 1", [row.topic])
        return cursor.fetchone() is not None


def _has(alias: str, topic: str, state: State) -> bool:
    return bool(_of(alias, topic).filter(state=state).exists())


def _of(alias: str, topic: str) -> Any:
    return OutboxMessage.objects.using(alias).filter(day=LIVE, topic=topic)


def _rows(alias: str, topic: str) -> Any:
    return PausedTopic.objects.using(alias).filter(topic=topic)

"""Paused topics: one row for each, which all relays share, and the messages that become `paused` and `ready` again.

A pass reads the paused topics before it claims messages. So before it makes messages `paused`, it locks the row of their topic
(KEY SHARE) and reads it again. Only a relay deletes such a row: under a conflicting lock, and after a separate statement has
found no paused message of the topic. So no message stays `paused` without a row. An operator's transaction updates rows and
never deletes one; it delays no pass, however long it is open.

A topic with a rate is always being resumed, and no faster than its rate: its ready messages become `paused`, except those that
are in its row (`limit`, `release_allowed`).

Only an operator's transaction waits for a lock. A relay skips locked rows and tries again in its next round.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.models import BooleanField, Count, ExpressionWrapper, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce

from exactly_once.sql.connections import fetch, is_postgresql, lock_timeout
from exactly_once.sql.days import LIVE
from exactly_once.sql.faults import is_collision
from exactly_once.sql.now import DatabaseTime, now, now_after
from exactly_once.transport.interface import Verdict
from exactly_once.wire.text import ERROR_LENGTH, printable
from outbox.models import OutboxMessage, PausedTopic
from outbox.states import PAUSE, RESUME, STOPPED, State, TopicState
from outbox.store.dialect import PAUSED_TOPICS, each_topic, live
from outbox.store.ready_index import SECONDARY
from outbox.store.transitions import count_moved
from outbox.store.unwritable_rows import UnwritableRows

_A_MOMENT = timedelta(milliseconds=100)
_FIRST_RESUMED = 10
"""Size of the first batch of a resumed topic. Each further batch is twice as large: if the queue is full again after a few
messages, only a few of them have used an attempt."""
_MOST_RESUMED = 500
_AT_LEAST_EVERY = timedelta(seconds=10)
"""After this time the next batch is resumed even if most of the last one is still ready: its rows may be unchangeable."""
_BURST_SECONDS = 0.1
_RELEASE_SECONDS = 0.05
"""Between two releases of a limited topic, so that each is of several messages at a high rate."""
_LONGEST_RELEASE = timedelta(seconds=1)
"""So that a rate that was raised in the settings applies soon, although the old one allows nothing for an hour."""
_ALL_BUT_ITS_TOPIC = (
    *("mode", "paused_by", "reason", "error_class", "paused_at"),
    *("probe_at", "pause_seconds", "in_trial", "allowed_at"),
)
_STRANDED = "Messages of the topic were paused, but its row was deleted."


def pause_in_hand(alias: str, positions: Mapping[str, Sequence[int]]) -> int:
    """Apply ready → paused to claimed messages of topics that are still paused; returns their number. Inside the claim.

    Messages that another relay has made ready since this pass looked for paused topics stay ready.

    Args:
        positions: by topic.
    """
    if not positions:
        return 0
    connection = connections[alias]
    among = f"topic IN ({', '.join(['%s'] * len(positions))})"
    lock = "FOR KEY SHARE SKIP LOCKED" if is_postgresql(connection) else ""
    rows = f"SELECT topic, CAST(in_trial AS text) FROM {PAUSED_TOPICS} WHERE mode <> 'resuming' AND {among} {lock}"
    in_trial = {topic: set(json.loads(those)) for topic, those in fetch(connection, rows, list(positions))}
    paused = [position for topic, those in in_trial.items() for position in positions[topic] if position not in those]
    return count_moved(alias, PAUSE, paused)


def pause_refused(alias: str, topic: str, verdict: Verdict, seconds: float, probe_after: timedelta) -> bool:
    """Pause a topic because the broker refuses it. False: it is already paused, or another transaction has locked its row."""
    given = [printable(verdict.reason, ERROR_LENGTH), verdict.outcome.value, probe_after.total_seconds(), seconds]
    columns = "'refused', '', %s, %s, {now}, {now_after}, %s, '[]', NULL"
    return _insert(alias, topic, columns, given, replacing="p.mode IN ('resuming', 'limited')")


def limit(alias: str, topic: str, per_second: float, positions: Sequence[int]) -> bool:
    """Begin to limit a topic to its rate. False: it is limited already or paused, or another transaction has locked its row.

    Args:
        positions: of ready messages, in the order to send them in. As many of them as its rate allows may be sent.
    """
    allowed = list(positions[: _burst(per_second)])
    given = [_RELEASE_SECONDS, json.dumps(allowed), len(allowed) / per_second - _BURST_SECONDS]
    columns = "'limited', '', '', '', {now}, {now_after}, 0, %s, {now_after}"
    return _insert(alias, topic, columns, given, replacing="p.mode = 'resuming'")


def _insert(alias: str, topic: str, columns: str, given: Sequence[Any], *, replacing: str) -> bool:
    """Insert the row of a topic, or replace one of which `replacing` is true. False: there is another, or it is locked."""
    connection = connections[alias]
    values = columns.format(now=now(connection), now_after=now_after(connection))
    replaced = ", ".join(f"{column} = EXCLUDED.{column}" for column in _ALL_BUT_ITS_TOPIC)
    try:
        with transaction.atomic(using=alias), lock_timeout(alias, _A_MOMENT):
            inserted = fetch(
                connection,
                f"INSERT INTO {PAUSED_TOPICS} AS p (topic, {', '.join(_ALL_BUT_ITS_TOPIC)}) VALUES (%s, {values}) "
                f"ON CONFLICT (topic) DO UPDATE SET {replaced} WHERE {replacing} RETURNING id",
                [topic, *given],
            )
            return bool(inserted)
    except OperationalError as error:
        if not is_collision(error):
            raise
        return False


def begin_trial(alias: str, topic: str, most: int, next_after: float, unwritable: UnwritableRows | None = None) -> int:
    """Apply paused → ready to the `most` oldest messages of a topic whose next probe is due; returns their number.

    Their positions are written into the topic's row, so that the relays that claim their shards send them. The row is deleted
    if the topic has no open message.

    Args:
        next_after: the next probe is due after this many times the pause, unless a relay stores the result of this one before.
    """
    unwritable = unwritable or UnwritableRows(alias)
    with transaction.atomic(using=alias):
        row = _locked(alias, topic, mode=TopicState.REFUSED, probe_at__lte=DatabaseTime())
        if row is None:
            return 0
        positions = _oldest_paused(alias, topic, most, unwritable)
        if not (positions or _has_open(alias, row)):
            row.delete(using=alias)
            return 0
        _rows(alias, topic).update(in_trial=positions, probe_at=DatabaseTime(timedelta(seconds=next_after * row.pause_seconds)))
        return unwritable.change(positions, partial(count_moved, alias, RESUME))


def prolong(alias: str, topic: str, verdict: Verdict, longest: float, next_after: float) -> str | None:
    """Double the pause of a topic whose probes were refused, up to `longest` seconds.

    It happens once for each set of probes, however many relays sent them. Returns the previous reason; None if another relay
    has prolonged the pause, or no probe was sent.
    """
    with transaction.atomic(using=alias):
        row = _locked(alias, topic, mode=TopicState.REFUSED)
        if row is None or not row.in_trial:
            return None
        seconds = min(2 * row.pause_seconds, longest)
        _rows(alias, topic).update(
            reason=printable(verdict.reason, ERROR_LENGTH),
            error_class=verdict.outcome.value,
            in_trial=[],
            pause_seconds=seconds,
            probe_at=DatabaseTime(timedelta(seconds=next_after * seconds)),
        )
        return str(row.reason)


def begin_resuming(alias: str, topic: str) -> bool:
    """Begin to resume a topic whose probe the broker took. False: the circuit breaker did not pause it, or it is locked."""
    with transaction.atomic(using=alias):
        row = _locked(alias, topic, mode=TopicState.REFUSED)
        if row is None:
            return False
        _begin_resuming(alias, topic)
        return True


def resume_some(alias: str, topic: str, most: int, unwritable: UnwritableRows | None = None) -> int:
    """Apply paused → ready to the next batch of a topic that is being resumed, the oldest first; returns the number.

    It does nothing until half of the last batch is no longer ready, so that messages of other topics are sent in between. The
    row is deleted when no message of the topic is paused.
    """
    unwritable = unwritable or UnwritableRows(alias)
    with transaction.atomic(using=alias):
        row = _locked(alias, topic, mode__in=[TopicState.RESUMING, TopicState.LIMITED])
        if row is None:
            return 0
        is_late = row.probe_at is None or row.is_late
        if not is_late and 2 * len(_ready(alias, row.in_trial)) > len(row.in_trial):
            return 0
        size = min(max(_FIRST_RESUMED, 2 * len(row.in_trial)), _MOST_RESUMED, most)
        if positions := _oldest_paused(alias, topic, size, unwritable):
            next_at = DatabaseTime(_AT_LEAST_EVERY)
            _rows(alias, topic).update(mode=TopicState.RESUMING, in_trial=positions, probe_at=next_at, allowed_at=None)
            return unwritable.change(positions, partial(count_moved, alias, RESUME))
        if not _has(alias, topic, State.PAUSED):
            row.delete(using=alias)
        return 0


def release_allowed(alias: str, topic: str, per_second: float, unwritable: UnwritableRows | None = None) -> int:
    """Apply paused → ready to as many messages of a limited topic as its rate allows, the oldest first; returns the number.

    Their positions are written into the topic's row, so that no pass makes them `paused` again. Messages that are not sent yet
    count, so that a relay or broker that was slow gets no more than a burst. The row is deleted when no message is paused, and
    a burst is allowed again.
    """
    unwritable = unwritable or UnwritableRows(alias)
    with transaction.atomic(using=alias):
        limited = _rows(alias, topic).filter(mode=TopicState.LIMITED).annotate(database_now=DatabaseTime())
        # A weaker lock than that of a row that is deleted: passes that make messages `paused` do not conflict with it.
        row: Any = limited.select_for_update(no_key=True, skip_locked=True).first()
        if row is None:
            return 0
        at, burst = row.database_now, timedelta(seconds=_BURST_SECONDS)
        # At most one message ahead, also if the clock was set back or the rate was raised.
        allowed_at = min(max(row.allowed_at, at - burst), at + timedelta(seconds=1 / per_second))
        unsent = _ready(alias, row.in_trial)
        number = min(math.floor(1 + (at - allowed_at).total_seconds() * per_second), _burst(per_second) - len(unsent))
        positions = _oldest_paused(alias, topic, max(0, number), unwritable)
        is_idle = not (unsent or positions) and row.allowed_at + burst <= at
        if is_idle and _locked(alias, topic) and not _has(alias, topic, State.PAUSED):
            row.delete(using=alias)
            return 0
        allowed_at += timedelta(seconds=len(positions) / per_second)
        probe_at = min(max(allowed_at, at) + timedelta(seconds=_RELEASE_SECONDS), at + _LONGEST_RELEASE)
        _rows(alias, topic).update(in_trial=[*unsent, *positions], allowed_at=allowed_at, probe_at=probe_at)
        return unwritable.change(positions, partial(count_moved, alias, RESUME))


def resume_stranded(alias: str) -> list[str]:
    """Begin to resume topics that have paused messages but no row, because the row was deleted by hand; returns them."""
    connection = connections[alias]
    paused = each_topic(f"{live(connection)} m WHERE m.state = 'paused'")
    without_row = f"{paused} AND NOT EXISTS (SELECT 1 FROM {PAUSED_TOPICS} p WHERE p.topic = name)"
    stranded = [name for (name,) in fetch(connection, without_row)]
    row = {"mode": TopicState.RESUMING, "reason": _STRANDED, "paused_at": DatabaseTime()}
    rows = [PausedTopic(topic=topic, **row) for topic in stranded]
    PausedTopic.objects.using(alias).bulk_create(rows, ignore_conflicts=True)
    return stranded


def paused_topics(alias: str) -> QuerySet[PausedTopic]:
    """The paused topics, annotated with the number of their paused `messages`."""
    of_it = OutboxMessage.objects.filter(day=LIVE, topic=OuterRef("topic"), state=State.PAUSED).order_by()
    counted = Subquery(of_it.values("topic").annotate(messages=Count("pk")).values("messages"))
    rows = PausedTopic.objects.using(alias).annotate(messages=Coalesce(counted, 0), database_now=DatabaseTime())
    return rows.order_by("topic")


def pause_topic(alias: str, topic: str, by: str, reason: str) -> TopicState:
    """Pause a topic for an operator, in the open transaction; returns its previous state."""
    found = _found(alias, topic)
    row = PausedTopic(topic=topic, paused_by=by, reason=printable(reason, ERROR_LENGTH), paused_at=DatabaseTime())
    # It overwrites a row that the circuit breaker may have inserted in between.
    PausedTopic.objects.using(alias).bulk_create(
        [row], update_conflicts=True, unique_fields=["topic"], update_fields=_ALL_BUT_ITS_TOPIC
    )
    return found


def resume_topic(alias: str, topic: str) -> TopicState:
    """Begin to resume a topic for an operator, in the open transaction; returns its previous state."""
    found = _found(alias, topic)
    if found in STOPPED:
        _begin_resuming(alias, topic)
    return found


def _begin_resuming(alias: str, topic: str) -> None:
    _rows(alias, topic).update(mode=TopicState.RESUMING, in_trial=[], probe_at=None, pause_seconds=0.0)


def _burst(per_second: float) -> int:
    """How many messages of a limited topic may be sent at once."""
    return math.floor(1 + _BURST_SECONDS * per_second)


def _found(alias: str, topic: str) -> TopicState:
    row: PausedTopic | None = _rows(alias, topic).select_for_update(no_key=True).first()
    return TopicState(row.mode) if row else TopicState.ACTIVE


def _locked(alias: str, topic: str, **conditions: Any) -> Any:
    """Lock the row of the topic, if it meets the conditions and no other transaction has locked it."""
    is_late = ExpressionWrapper(Q(probe_at__lte=DatabaseTime()), output_field=BooleanField())
    rows = _rows(alias, topic).filter(**conditions).annotate(is_late=is_late)
    return rows.select_for_update(skip_locked=True).first()


def _oldest_paused(alias: str, topic: str, most: int, unwritable: UnwritableRows) -> list[int]:
    paused = _of(alias, topic).filter(state=State.PAUSED).exclude(pk__in=list(unwritable.skipped())).order_by("pk")
    return list(paused.select_for_update(no_key=True, skip_locked=True).values_list("pk", flat=True)[:most])


def _ready(alias: str, positions: Collection[int]) -> list[int]:
    rows = OutboxMessage.objects.using(alias).filter(day=LIVE, pk__in=positions, state=State.READY)
    return list(rows.order_by("pk").values_list("pk", flat=True))


def _has_open(alias: str, row: PausedTopic) -> bool:
    """Has the topic a ready probe, a retrying or paused message, or one in the secondary ready index?"""
    if _ready(alias, row.in_trial) or _has(alias, row.topic, State.RETRYING) or _has(alias, row.topic, State.PAUSED):
        return True
    released = f"SELECT 1 FROM {live(connections[alias])} m WHERE {SECONDARY} AND m.topic = %s LIMIT 1"
    return bool(fetch(connections[alias], released, [row.topic]))


def _has(alias: str, topic: str, state: State) -> bool:
    return bool(_of(alias, topic).filter(state=state).exists())


def _of(alias: str, topic: str) -> Any:
    return OutboxMessage.objects.using(alias).filter(day=LIVE, topic=topic)


def _rows(alias: str, topic: str) -> Any:
    return PausedTopic.objects.using(alias).filter(topic=topic)

"""Operators' queries and decisions: retry, override, skip, replace, purge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.models import F, Min, Q

from exactly_once.sql.connections import lock_timeout
from exactly_once.sql.faults import is_collision
from exactly_once.sql.now import NOW_AFTER, DatabaseTime
from exactly_once.wire.text import ERROR_LENGTH, printable
from inbox.errors import NotEditable
from inbox.models import SETTLED, InboxMessage, State, Step
from inbox.store.dialect import LONGEST_LOCK_WAIT, TABLE
from inbox.store.due import longest_due
from inbox.store.inserting import Insertion, insert_one
from inbox.store.ordering import deciding, hold_gates, is_head, promote_next
from inbox.store.rows import ConcurrentDuplicate, NewRow
from inbox.store.trail import record

_PAIRS = {
    "postgresql": (
        "WITH RECURSIVE pairs AS ("
        f"(SELECT m.handler, m.topic FROM {TABLE} m ORDER BY m.handler, m.topic LIMIT 1) UNION ALL "
        f"SELECT following.* FROM pairs, LATERAL (SELECT m.handler, m.topic FROM {TABLE} m "
        "WHERE (m.handler, m.topic) > (pairs.handler, pairs.topic) ORDER BY m.handler, m.topic LIMIT 1) following"
        ") SELECT handler, topic FROM pairs LIMIT %s"
    ),
    "sqlite": f"SELECT DISTINCT m.handler, m.topic FROM {TABLE} m ORDER BY m.handler, m.topic LIMIT %s",
}
"""On PostgreSQL a loose index scan: one index lookup for each pair, not for each message."""
OPERATORS_WAIT = timedelta(seconds=10)
deleted_together: list[Callable[[str, Sequence[int]], object]] = []
"""Called with the alias and the ids of rows that are being purged, in their transaction. An optional package that stores more
about a row deletes it here."""
ROW_LOCKED = "Row {} is locked by another transaction, which did not end in time. Nothing was changed. Try again later."

RETRYABLE = (State.DEAD, State.RETRYING, State.RECEIVED, State.RUNNING)
SKIPPABLE = (State.DEAD, State.RETRYING, State.RECEIVED, State.RUNNING, State.WAITING)
"""A running message only after its lease has ended."""
TRIED_AGAIN: Mapping[str, Any] = {
    "state": State.RETRYING,
    "attempts": 0,
    "fence": F("fence") + 1,
    "next_attempt_at": DatabaseTime(),
    "settled_at": None,
}


def handlers_with_topics(alias: str, most: int = 10_000) -> list[tuple[str, str]]:
    """The handlers of all messages with their topics, up to a limit."""
    with connections[alias].cursor() as cursor:
        cursor.execute(_PAIRS[connections[alias].vendor], [most])
        return list(cursor.fetchall())


def handlers_and_topics(alias: str) -> tuple[list[str], list[str]]:
    """The handlers and the topics of all messages, up to a limit."""
    found = handlers_with_topics(alias)
    return sorted({handler for handler, _ in found}), sorted({topic for _, topic in found})


def retry(alias: str, row: int, *, reason: str = "", after: timedelta = timedelta()) -> bool:
    """dead | retrying | received → retrying, due `after` a delay, with a full set of attempts. False: in none of these states.

    running, past its lease → running, due now; its owner can settle nothing. False also if the maximum message age has
    refused it, see `override_maximum_age`. While a handler is running the message, this waits for up to ten seconds. In an
    order the message is `waiting` while another precedes it.

    Args:
        reason: for the trail: the operator.
    """
    written = {**TRIED_AGAIN, "next_attempt_at": DatabaseTime(after)} if after else TRIED_AGAIN
    return _decide(alias, row, RETRYABLE, reason, quarantined=False, written=written)


def override_maximum_age(alias: str, row: int, *, reason: str = "") -> bool:
    """dead, refused by the maximum message age → retrying, due now. False: it is in another state.

    The operator asserts that it has not been handled before. From then on it is a normal message, and further copies are
    duplicates.

    Args:
        reason: for the trail: the operator and the reason.
    """
    recorded = "; ".join(filter(None, ("the maximum message age was overridden", reason)))
    return _decide(alias, row, [State.DEAD], recorded, quarantined=True, written={**TRIED_AGAIN, "quarantined": False})


def skip(alias: str, row: int, reason: str, *, by: str = "", fence: int | None = None) -> bool:
    """dead | retrying | received | waiting → skipped: its effect will not happen. False: it is in none of these states.

    running, past its lease → skipped; its owner can settle nothing. An external lease may have been extended without a
    change of the row: see `inbox.leases.operating`.

    While a handler is running the message, this waits for up to ten seconds. In an order the next message is promoted.

    Args:
        reason: stored in the row and in the trail.
        by: for the trail: the operator.
        fence: only the row of this claim, which has not been claimed or decided since.
    """
    only = {} if fence is None else {"fence": fence}
    return _decide(alias, row, SKIPPABLE, "; ".join(filter(None, (reason, by))), written=skipped(reason), **only)


def replace(alias: str, row: int, corrected: NewRow, *, by: str = "") -> int | None:
    """dead → skipped, and ∅ → received, due now, for the row that replaces it; its id. None: it is no longer dead.

    Also None if the maximum message age has refused it, see `override_maximum_age`. An ordered message's new row has the
    old row's place in the order; it is `waiting` while an earlier message of its key is open.

    Args:
        corrected: the message with its new payload and a biz-id that no other row has.
        by: the operator, for the reason of the old row and for the trail of both.

    Raises:
        NotEditable: another transaction has locked the row and did not end in time, or another row has the new biz-id.
    """
    try:
        with deciding(alias), lock_timeout(alias, OPERATORS_WAIT):
            found = InboxMessage.objects.using(alias).filter(pk=row, state=State.DEAD, quarantined=False)
            replaced = found.select_for_update().only("handler", "key", "ordered", "place", "biz_id", "fence").first()
            return None if replaced is None else _replace(alias, replaced, corrected, by)
    except ConcurrentDuplicate as error:
        raise NotEditable(
            f"Another transaction is storing a message with the biz-id {corrected.biz_id}, which the corrected message would "
            "have. Nothing was changed. Try again later."
        ) from error
    except OperationalError as error:
        if is_collision(error):
            raise NotEditable(ROW_LOCKED.format(row)) from error
        raise


def _replace(alias: str, replaced: InboxMessage, corrected: NewRow, by: str) -> int:
    place, waits = replaced.place or replaced.pk, False
    if replaced.ordered:
        hold_gates(alias, replaced.handler, [replaced.key])
        waits = not is_head(alias, replaced.handler, replaced.key, place)
    insertion = Insertion(
        row=corrected,
        state=State.WAITING if waits else State.RECEIVED,
        due_after=0.0,
        ordered=replaced.ordered,
        place=place if replaced.ordered else None,
        replaces_id=replaced.pk,
        # Fencing tokens of the corrected message are greater than those of this one.
        fence=replaced.fence,
    )
    row = insert_one(alias, insertion, LONGEST_LOCK_WAIT)
    if row is None:
        raise NotEditable(
            f"Another row of this handler has the biz-id {corrected.biz_id}, which the corrected message would have. "
            "Nothing was changed. Compare the two messages, and skip this one if the other has the same effect."
        )
    reason = "; ".join(filter(None, (f"replaced by row {row} (biz-id {corrected.biz_id})", by)))
    InboxMessage.objects.using(alias).filter(pk=replaced.pk).update(**skipped(reason))
    record(alias, [replaced.pk], was=State.DEAD, reason=reason)
    origin = f"replaces row {replaced.pk} (biz-id {replaced.biz_id}) with another payload"
    record(alias, [row], was="", reason="; ".join(filter(None, (origin, by))))
    return row


def skipped(reason: str) -> Mapping[str, Any]:
    return {
        "state": State.SKIPPED,
        "last_error": printable(f"skipped: {reason}", ERROR_LENGTH),
        "next_attempt_at": None,
        "settled_at": DatabaseTime(),
    }


def _decide(alias: str, row: int, allowed: Sequence[State], reason: str, *, written: Mapping[str, Any], **only: Any) -> bool:
    try:
        with deciding(alias), lock_timeout(alias, OPERATORS_WAIT):
            found = InboxMessage.objects.using(alias).filter(pk=row, state__in=allowed, **only)
            found = found.exclude(state=State.RUNNING, next_attempt_at__gt=DatabaseTime())
            message = found.select_for_update().only("handler", "key", "ordered", "place", "state").first()
            if message is not None:
                _write(alias, message, written)
                record(alias, [row], was=message.state, reason=reason)
            return message is not None
    except OperationalError as error:
        if is_collision(error):
            return False
        raise


def _write(alias: str, message: InboxMessage, written: Mapping[str, Any]) -> None:
    row = InboxMessage.objects.using(alias).filter(pk=message.pk)
    if message.state == State.RUNNING:
        # Only its lease store knows whether it has been run, so it stays running until its next owner has the lease.
        state = State.RUNNING if written["state"] == State.RETRYING else written["state"]
        written = {**written, "state": state}
    if not message.ordered or message.state == State.WAITING:
        # The holder of the gate may be waiting for a waiting row, which is not the head.
        row.update(**written)
        return
    hold_gates(alias, message.handler, [message.key])
    if written["state"] == State.RETRYING and not is_head(alias, message.handler, message.key, message.place or message.pk):
        written = {**written, "state": State.WAITING, "next_attempt_at": None}
    row.update(**written)
    promote_next(alias, message.handler, message.key)


def oldest_waiting(alias: str) -> datetime | None:
    """The time since which the oldest message has waited, past its due time or behind its key's head; None: none waits."""
    messages = InboxMessage.objects.using(alias)
    due = messages.filter(pk__in=longest_due(alias)).aggregate(since=Min("next_attempt_at"))
    behind = messages.filter(state=State.WAITING).aggregate(since=Min("received_at"))
    return min(filter(None, (due["since"], behind["since"])), default=None)


def purge_settled(
    alias: str, older_than: timedelta, *, chunk: int = 1000, kept: Collection[str] = (), since: datetime | None = None
) -> Iterator[int]:
    """Delete settled rows older than `older_than`, in small transactions; yields the number deleted by each.

    Args:
        kept: handlers whose rows stay.
        since: rows that were settled before are not read; None reads all.

    Open and dead messages stay until they are settled. A row also stays for `older_than` after its latest duplicate with other
    content: it may have the only copy of that content, or be what makes further copies of it duplicates.
    """
    old = _settled_before(alias, older_than, kept).order_by("settled_at").values_list("pk", "settled_at")
    while found := list((old if since is None else old.filter(settled_at__gte=since))[:chunk]):
        yield _delete(alias, [pk for pk, _ in found], older_than)
        # There may be many rows that stay, and each chunk would read them again. SQLite's instants have milliseconds.
        since = found[-1][1] - timedelta(milliseconds=1)


def _delete(alias: str, ids: Sequence[int], older_than: timedelta) -> int:
    """Delete rows by SQL: Django's delete() would first read every row with its body, because steps refer to it."""
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        places = ", ".join(["%s"] * len(ids))
        cursor.execute(
            # A duplicate with other content may have come since they were selected.
            f"DELETE FROM {TABLE} WHERE id IN ({places}) AND state IN ('done', 'skipped', 'shed') "
            f"AND (conflicting_at IS NULL OR conflicting_at < {NOW_AFTER[connections[alias].vendor]}) RETURNING id",
            [*ids, -older_than.total_seconds()],
        )
        deleted = [row for (row,) in cursor.fetchall()]
        Step.objects.using(alias).filter(message_id__in=deleted).delete()
        for delete in deleted_together:
            delete(alias, deleted)
        return len(deleted)


def purgeable(alias: str, older_than: timedelta, *, kept: Collection[str] = ()) -> int:
    """How many rows `purge_settled` would delete."""
    count: int = _settled_before(alias, older_than, kept).count()
    return count


def _settled_before(alias: str, older_than: timedelta, kept: Collection[str]) -> Any:
    before = DatabaseTime(-older_than)
    settled = InboxMessage.objects.using(alias).filter(state__in=SETTLED, settled_at__lt=before).exclude(handler__in=kept)
    return settled.filter(Q(conflicting_at=None) | Q(conflicting_at__lt=before))

"""Prepared messages: written before their effect happens, and decided afterwards.

Three parties may decide at the same time: the code that prepared the message, its checker in a relay, and an operator. Every
decision is one UPDATE of a row that is locked and still undecided, so exactly one of them takes effect.

The next check of a prepared row is due at `available_at`; `attempts` counts the answers "unknown".
"""

import uuid
from collections import Counter
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from django.db import connections, transaction
from django.db.models import QuerySet

from exactly_once.sql.days import LIVE
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.text import ERROR_LENGTH, printable
from outbox.models import OutboxMessage, TrailEntry
from outbox.states import GIVE_UP, SETTLED, UNDECIDED, State
from outbox.store.dialect import live
from outbox.store.selecting import find
from outbox.store.transitions import Found, move

_MOST_REPORTED = 500
_NO_CHECKER = "no answer: no running process has a checker for its topic"


def make_check_due(alias: str, position: int) -> bool:
    """Make the check of a prepared message due now. False: it is not prepared."""
    return _update(alias, position, available_at=DatabaseTime())


def claim_checks(alias: str, topics: Collection[str], limit: int, every: timedelta) -> list[OutboxMessage]:
    """Claim up to `limit` due checks of prepared messages of these topics, the longest due first.

    Their next check is due after `every`: no other process asks about them until then, and another one asks if this process
    dies.
    """
    due = _prepared(alias).filter(topic__in=topics, available_at__lte=DatabaseTime())
    if not due.exists():  # without a lock: SQLite has one writer
        return []
    with transaction.atomic(using=alias):
        found = list(due.select_for_update(skip_locked=True).order_by("available_at", "pk")[:limit])
        _prepared(alias).filter(pk__in=[row.pk for row in found]).update(available_at=DatabaseTime(every))
    return found


def defer_check(alias: str, position: int, every: timedelta, said: str) -> bool:
    """Defer the next check to `every` from now, because the checker still runs. False: the message was decided meanwhile."""
    return _update(alias, position, available_at=DatabaseTime(every), last_error=printable(said, ERROR_LENGTH))


def record_unchecked(alias: str, topics: Collection[str], overdue: timedelta) -> dict[str, int]:
    """The number of messages per other topic whose check is overdue by `overdue`.

    Their check becomes due now, for a process that has the checker. If there is none, a later call finds them again.
    """
    none_asked = _prepared(alias).filter(available_at__lte=DatabaseTime(-overdue)).exclude(topic__in=topics)
    found = dict(none_asked.values_list("pk", "topic")[:_MOST_REPORTED])
    if found:
        none_asked.filter(pk__in=found).update(available_at=DatabaseTime(), last_error=_NO_CHECKER)
    return dict(Counter(found.values()))


def count_unknown(alias: str, position: int, seen: int, limit: int, said: str) -> str | None:
    """prepared → prepared with one more answer "unknown" than `seen`; → stuck with the last of `limit`.

    It returns the new state; None if the message was decided meanwhile, or another process has counted an answer.
    """
    asked = seen + 1
    row = _prepared(alias).filter(pk=position, attempts=seen)
    last_error = printable(said, ERROR_LENGTH)
    if asked < limit:
        return State.PREPARED if row.update(attempts=asked, last_error=last_error) else None
    unchanged = f"SELECT id FROM {live(connections[alias])} WHERE id = %s AND state = 'prepared' AND attempts = %s"
    stuck = move(alias, GIVE_UP, Found(unchanged, [position, seen], "FOR UPDATE"), reason=said, error=last_error)
    return State.STUCK if stuck else None


def record_no_answer(alias: str, position: int, error: str) -> bool:
    """Record why a check gave no answer; this is not counted. False: the message is not prepared any more."""
    return _update(alias, position, last_error=printable(error, ERROR_LENGTH))


def state_of(alias: str, message_id: uuid.UUID) -> str:
    """The state of a message; of a deleted one its last, as its trail has it. "" if its trail has no decision either."""
    for state in find(alias, {"message_id": message_id}).values():
        return state
    decided = TrailEntry.objects.using(alias).filter(message_id=message_id).exclude(became__in=UNDECIDED)
    last = decided.order_by("-pk").values_list("became", flat=True).first() or ""
    # A deleted message is settled, and its trail need not have that it was published.
    return State.PUBLISHED if last and last not in SETTLED else last


def _update(alias: str, position: int, **columns: Any) -> bool:
    return bool(_prepared(alias).filter(pk=position).update(**columns))


def _prepared(alias: str) -> QuerySet[OutboxMessage]:
    return OutboxMessage.objects.using(alias).filter(day=LIVE, state=State.PREPARED)

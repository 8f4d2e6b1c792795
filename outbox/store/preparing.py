"""Prepared messages: written before anybody knows whether their business happens, and decided about afterwards.

Three may decide at the same time: the code that prepared the message, its checker in some relay, and a person. Every decision
is one UPDATE of a row that is still undecided, with the row locked before, so exactly one of them decides.

A prepared row is due (`available_at`) when its checker is to be asked next, and its `attempts` are the answers "unknown".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from datetime import timedelta

from django.db import transaction
from django.db.models import QuerySet

from outbox.database.now import DatabaseTime
from outbox.kernel.text import ERROR_LENGTH, printable
from outbox.models import OutboxMessage
from outbox.states import COMMIT, GIVE_UP, RESUME_CHECKS, ROLL_BACK, UNDECIDED, State
from outbox.store.dialect import TABLE
from outbox.store.transitions import Found, move

_TOLD_AT_ONCE = 500
_NO_CHECKER = "no answer: no process that runs has a checker for its topic"


def commit_prepared(alias: str, position: int, *, reason: str = "") -> bool:
    """Its business has happened. False: it was decided about before."""
    return bool(move(alias, COMMIT, [position], reason=reason))


def roll_back_prepared(alias: str, position: int, *, reason: str = "") -> bool:
    """Its business has not happened: it is never sent. False: it was decided about before."""
    return bool(move(alias, ROLL_BACK, [position], reason=reason))


def resume(alias: str, position: int, *, reason: str = "") -> bool:
    """Have the checker of a stuck message asked at once, and anew as often. False: it is not stuck."""
    return bool(move(alias, RESUME_CHECKS, [position], reason=reason))


def ask_at_once(alias: str, position: int) -> bool:
    """Have the checker of a prepared message asked as soon as a relay can. False: it is not prepared."""
    return bool(_prepared(alias).filter(pk=position).update(available_at=DatabaseTime()))


def claim_checks(alias: str, topics: Collection[str], limit: int, every: timedelta) -> list[OutboxMessage]:
    """Up to `limit` prepared messages of these topics whose check is due, the longest due first.

    Their next check comes after `every`, so that no other process asks about them meanwhile, and one that dies while it asks
    is followed by another.
    """
    due = _prepared(alias).filter(topic__in=topics, available_at__lte=DatabaseTime())
    if not due.exists():  # without a lock: SQLite has one writer
        return []
    with transaction.atomic(using=alias):
        found = list(due.select_for_update(skip_locked=True).order_by("available_at", "pk")[:limit])
        _prepared(alias).filter(pk__in=[row.pk for row in found]).update(available_at=DatabaseTime(every))
    return found


def keep_check(alias: str, position: int, every: timedelta, said: str) -> bool:
    """Its checker still runs: its next check comes after `every` from now. False: it was decided about meanwhile."""
    return bool(
        _prepared(alias).filter(pk=position).update(available_at=DatabaseTime(every), last_error=printable(said, ERROR_LENGTH))
    )


def topics_unchecked(alias: str, topics: Collection[str]) -> list[str]:
    """Of which topics other than these there are messages that nobody has decided about."""
    others = OutboxMessage.objects.using(alias).filter(state__in=UNDECIDED).exclude(topic__in=topics)
    return sorted(others.values_list("topic", flat=True).distinct())


def note_unchecked(alias: str, topics: Collection[str], overdue: timedelta) -> dict[str, int]:
    """How many messages of which other topics no checker was asked about, though they are `overdue`.

    They are due again from now on, for whoever has the checker; and when nobody has, this finds them again.
    """
    none_asked = _prepared(alias).filter(available_at__lte=DatabaseTime(-overdue)).exclude(topic__in=topics)
    found = dict(none_asked.values_list("pk", "topic")[:_TOLD_AT_ONCE])
    if found:
        none_asked.filter(pk__in=found).update(available_at=DatabaseTime(), last_error=_NO_CHECKER)
    return dict(Counter(found.values()))


def count_unknown(alias: str, position: int, seen: int, limit: int, said: str) -> str | None:
    """prepared → prepared with one more answer "unknown" than the `seen` ones; → stuck with the last of `limit`.

    The state it is in now; None: it was decided about meanwhile, or another process has counted.
    """
    asked = seen + 1
    row = _prepared(alias).filter(pk=position, attempts=seen)
    last_error = printable(said, ERROR_LENGTH)
    if asked < limit:
        return State.PREPARED if row.update(attempts=asked, last_error=last_error) else None
    unchanged = f"SELECT id FROM {TABLE} WHERE id = %s AND state = 'prepared' AND attempts = %s"
    stuck = move(alias, GIVE_UP, Found(unchanged, [position, seen], "FOR UPDATE"), reason=said, error=last_error)
    return State.STUCK if stuck else None


def note_no_answer(alias: str, position: int, error: str) -> bool:
    """Why a prepared message could not be asked about; that is not counted. False: it is not prepared any more."""
    return bool(_prepared(alias).filter(pk=position).update(last_error=printable(error, ERROR_LENGTH)))


def _prepared(alias: str) -> QuerySet[OutboxMessage]:
    return OutboxMessage.objects.using(alias).filter(state=State.PREPARED)

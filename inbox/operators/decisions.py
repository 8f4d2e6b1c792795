"""Operators' decisions about stored messages: retry, override, skip. Of one message or of many, by the same guarded change.

A decision locks a row, checks its state, changes it and records that, in one transaction. Many rows are changed by one
statement for each state that they have. A row in an order and a Celery task are decided one by one: another row is promoted, or
the task is sent again. Whether a running message has been left by its owner, the lease store says before a row is locked.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, reduce, wraps
from operator import or_
from typing import Any, ParamSpec, TypeVar

from django.db import OperationalError, connections, transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext_lazy as _

from exactly_once.console.operators.changes import DELETED, in_hand_now, state_now
from exactly_once.sql.connections import is_postgresql, lock_timeout
from exactly_once.sql.days import LIVE
from exactly_once.sql.faults import SERIALIZATION_FAILURE, is_collision, sqlstate_of
from exactly_once.sql.now import DatabaseTime
from exactly_once.states import Transition
from exactly_once.upkeep.operation_rows import RowOutcome
from exactly_once.wire.formats import CELERY_TOPICS
from exactly_once.wire.text import ERROR_LENGTH, describe, printable
from inbox.conf import inbox_options
from inbox.errors import NotEditable, TaskNotSent
from inbox.leases.stores import LeaseStoreUnavailable, lease_store
from inbox.models import InboxMessage, Receipt
from inbox.states import OVERRIDE, RETRY, SKIP, State
from inbox.store import receipts
from inbox.store.message_rows import stored_row
from inbox.store.ordering import deciding, hold_gates, is_head, promote_next
from inbox.store.trail_entries import update

_P = ParamSpec("_P")
_T = TypeVar("_T")
OPERATORS_WAIT = timedelta(seconds=10)
REFUSALS = (TaskNotSent, NotEditable, LeaseStoreUnavailable)
"""Exceptions with which an action on one message reports that it was refused."""
_WHY_NOT = {
    True: _("it is in quarantine; use “Retry past the maximum message age…”"),
    False: _("it is not in quarantine; use “Retry now”"),
}
_NAMED = ("handler", "topic", "key", "ordered", "place", "state", "quarantined", "message_id", "biz_id")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A transition that an operator has decided.

    Attributes:
        written: the columns that it changes.
        reason: for the trail.
        sources: restricts the states that allow it.
    """

    transition: Transition
    written: Mapping[str, Any]
    reason: str
    sources: Collection[str] | None = None

    @property
    def allowed(self) -> Collection[str]:
        """The states that allow it."""
        return self.transition.sources if self.sources is None else self.sources

    def why_not(self, message: InboxMessage) -> str:
        """Why this message's state does not allow it; "" if it does."""
        if message.state not in self.allowed:
            return state_now(message)
        return "" if self.transition.allows(message) else str(_WHY_NOT[message.quarantined])

    def written_in(self, state: str) -> Mapping[str, Any]:
        """The columns that it changes of a message in this state."""
        if state == State.RUNNING and self.written["state"] == State.RETRYING:
            # Only its lease store knows whether it has been run, so it stays running until its next owner has the lease.
            return {**self.written, "state": State.RUNNING}
        return self.written


def retrying(reason: str = "", *, sources: Collection[str] | None = None, after: timedelta = timedelta()) -> Decision:
    """dead | retrying | received → retrying, due `after` a delay, with a full set of attempts.

    running, past its lease → running, due now; its owner can settle nothing. Not if the maximum message age has refused it, see
    `overriding`. In an order the message is `waiting` while another precedes it. A Celery task is sent again, because the inbox
    does not run it.

    Args:
        reason: for the trail: the operator.
    """
    written = {**RETRY.columns, "next_attempt_at": DatabaseTime(after)}
    return Decision(transition=RETRY, sources=sources, written=written, reason=reason)


def overriding(reason: str = "") -> Decision:
    """dead, refused by the maximum message age → retrying, due now.

    The operator asserts that it has not been handled before. From then on it is a normal message, and further copies are
    duplicates.

    Args:
        reason: for the trail: the operator and the reason.
    """
    recorded = "; ".join(filter(None, ("the maximum message age was overridden", reason)))
    written = {**OVERRIDE.columns, "next_attempt_at": DatabaseTime()}
    return Decision(transition=OVERRIDE, written=written, reason=recorded)


def skipping(reason: str, *, by: str = "", sources: Collection[str] | None = None) -> Decision:
    """dead | retrying | received | waiting → skipped: its effect will not happen.

    running, past its lease → skipped; its owner can settle nothing. In an order the next message is promoted.

    Args:
        reason: stored in the row and in the trail.
        by: for the trail: the operator.
    """
    return Decision(transition=SKIP, sources=sources, written=skipped(reason), reason="; ".join(filter(None, (reason, by))))


def skipped(reason: str) -> Mapping[str, Any]:
    return {**SKIP.columns, "last_error": printable(f"skipped: {reason}", ERROR_LENGTH)}


def decide(alias: str, row: int, decision: Decision) -> RowOutcome:
    """Make the transition of one message. While a handler is running the message, this waits for up to ten seconds.

    Raises:
        TaskNotSent, LeaseStoreUnavailable: nothing was changed.
    """
    outcome = _decide(alias, row, decision)
    if outcome.is_locked and (ended := _ended_leases(alias, [row])):
        outcome = _decide(alias, row, decision, ended)
    return outcome


def _decide(alias: str, row: int, decision: Decision, ended: Mapping[int, int] | None = None) -> RowOutcome:
    """The same, with the running messages whose leases have ended."""
    try:
        with waiting_for_locks(alias):
            message = _decidable(alias, [row], ended or {}).select_for_update().only(*_NAMED).first()
            if message is not None and not decision.why_not(message):
                _write(alias, message, decision)
                _remember_longer(alias, [row], decision)
                if decision.written["state"] == State.RETRYING and _is_task(message):
                    _resend(alias, row)
                return RowOutcome(row, _name(message))
    except OperationalError as error:
        if not is_collision(error):
            raise
    (unchanged,) = _unchanged(alias, [row], decision)
    return unchanged


def _unchanged(alias: str, rows: Sequence[int], decision: Decision) -> list[RowOutcome]:
    """The outcomes of messages that could not be locked: settled or deleted ones, or a process is working on them."""
    days = {*receipts.days_of(alias, rows).values()}
    found = {
        message.pk: message for message in InboxMessage.objects.using(alias).only(*_NAMED).filter(pk__in=rows, day__in=days)
    }
    outcomes = [RowOutcome(row, f"number {row}", str(DELETED)) for row in rows if row not in found]
    for row, message in found.items():
        why = decision.why_not(message)
        outcomes.append(RowOutcome(row, _name(message), why or in_hand_now(message), is_locked=not why))
    return outcomes


def again_if_settled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decide once more if another transaction has settled a row while it was being locked, to read its new state.

    A settled row moves to another partition, and PostgreSQL refuses to lock the version that was found before.
    """

    @wraps(function)
    def decided(*given: _P.args, **named: _P.kwargs) -> _T:
        try:
            return function(*given, **named)
        except (OperationalError, NotEditable) as error:
            cause = error.__cause__ if isinstance(error, NotEditable) else error
            if cause is None or sqlstate_of(cause) != SERIALIZATION_FAILURE:
                raise
        return function(*given, **named)

    return decided


@again_if_settled
def decide_many(alias: str, rows: Sequence[int], decision: Decision, *, waits: bool = True) -> list[RowOutcome]:
    """Make the transition of these messages. A locked row is waited for if it is the only one, unless `waits` is false."""
    if waits and len(rows) == 1:
        return _one_by_one(alias, rows, decision, decide)
    changed: dict[str, list[int]] = {}
    outcomes: list[RowOutcome] = []
    one_at_a_time: list[int] = []
    ended: Mapping[int, int] = {}
    if State.RUNNING in decision.allowed:
        try:
            ended = _ended_leases(alias, rows)
        except LeaseStoreUnavailable as error:
            running = set(_running(alias, rows).values_list("pk", flat=True))
            outcomes = [RowOutcome(row, unchanged=str(error), is_error=True) for row in rows if row in running]
            rows = [row for row in rows if row not in running]
    with transaction.atomic(using=alias):
        lockable = _decidable(alias, rows, ended).select_for_update(skip_locked=is_postgresql(connections[alias]))
        found = {message.pk: message for message in lockable.only(*_NAMED).order_by("pk")}
        for row, message in found.items():
            if why := decision.why_not(message):
                outcomes.append(RowOutcome(row, _name(message), why))
            elif message.ordered or _is_task(message):
                one_at_a_time.append(row)
            else:
                changed.setdefault(message.state, []).append(row)
        for state, together in changed.items():
            update(alias, _live(alias, together), decision.written_in(state), was=state, reason=decision.reason)
            _remember_longer(alias, together, decision)
            outcomes += map(RowOutcome, together)
    if missing := [row for row in rows if row not in found]:
        outcomes += _unchanged(alias, missing, decision)
    return outcomes + _one_by_one(alias, one_at_a_time, decision, partial(_decide, ended=ended))


def _one_by_one(alias: str, rows: Iterable[int], decision: Decision, decide: Callable[..., RowOutcome]) -> list[RowOutcome]:
    """Decide in a savepoint each. One that is refused does not affect the others."""
    outcomes = []
    for row in rows:
        try:
            with transaction.atomic(using=alias):
                outcomes.append(decide(alias, row, decision))
        except REFUSALS as error:
            outcomes.append(RowOutcome(row, unchanged=str(error), is_error=True))
    return outcomes


def _remember_longer(alias: str, rows: Sequence[int], decision: Decision) -> None:
    """Keep the receipts of messages that are run now for `RETENTION` from now on: one that was dead may be as old as that."""
    if decision.written["state"] == State.RETRYING:
        Receipt.objects.using(alias).filter(pk__in=rows).update(retried_at=DatabaseTime())


def _name(message: InboxMessage) -> str:
    return f"{message.message_id} ({message.topic} {message.biz_id}, {message.handler})"


def _is_task(message: InboxMessage) -> bool:
    return message.handler == message.topic and message.topic.startswith(CELERY_TOPICS)


def _running(alias: str, rows: Sequence[int]) -> QuerySet[InboxMessage]:
    """Those that are running under a lease that has ended according to their row."""
    return _live(alias, rows).filter(state=State.RUNNING).exclude(next_attempt_at__gt=DatabaseTime())


def _ended_leases(alias: str, rows: Sequence[int]) -> dict[int, int]:
    """Of these, with their fences, those that have ended also according to their store, which extends some without the row.

    It is asked while no row is locked, because it may be slow. Another owner changes the fence.
    """
    store = lease_store(inbox_options())
    return {message.pk: message.fence for message in _running(alias, rows) if not store.is_held(alias, stored_row(message))}


@contextmanager
def waiting_for_locks(alias: str) -> Iterator[None]:
    """The transaction of a decision, which waits for a row for up to ten seconds."""
    with deciding(alias), lock_timeout(alias, OPERATORS_WAIT):
        yield


def _live(alias: str, rows: Sequence[int]) -> QuerySet[InboxMessage]:
    return InboxMessage.objects.using(alias).filter(pk__in=rows, day=LIVE)


def _decidable(alias: str, rows: Sequence[int], ended: Mapping[int, int]) -> QuerySet[InboxMessage]:
    """Those of these messages that no process is running."""
    left = (Q(pk=row, fence=fence) for row, fence in ended.items())
    rows_to_lock = _live(alias, rows).filter(reduce(or_, left, ~Q(state=State.RUNNING)))
    return rows_to_lock.exclude(state=State.RUNNING, next_attempt_at__gt=DatabaseTime())


def _write(alias: str, message: InboxMessage, decision: Decision) -> None:
    written = decision.written_in(message.state)
    write = partial(update, alias, _live(alias, [message.pk]), was=message.state, reason=decision.reason)
    if not message.ordered or message.state == State.WAITING:
        # The holder of the gate may be waiting for a waiting row, which is not the head.
        write(written)
        return
    hold_gates(alias, message.handler, [message.key])
    if written["state"] == State.RETRYING and not is_head(alias, message.handler, message.key, message.place or message.pk):
        written = {**written, "state": State.WAITING, "next_attempt_at": None}
    write(written)
    promote_next(alias, message.handler, message.key)


def _resend(alias: str, row: int) -> None:
    """Send the Celery task of this row again, in the transaction that made the row due: the inbox does not run tasks.

    A task that arrives before the commit waits.

    Raises:
        TaskNotSent: it cannot be sent.
    """
    stored = InboxMessage.objects.using(alias).get(pk=row, day=LIVE)
    try:
        from celery import current_app  # noqa: PLC0415 - Celery is optional; such a row exists only with it

        from inbox.celery.calls import signature_of  # noqa: PLC0415 - imports Celery, too
        from inbox.celery.sending import send  # noqa: PLC0415
    except ImportError as error:
        raise TaskNotSent(f"{stored.handler} cannot be sent: {describe(error)}") from error
    signature = signature_of(stored)
    if signature is None:
        raise TaskNotSent(
            f"{stored.handler} cannot be sent: its arguments were not JSON. Call the task from code, then skip this message."
        )
    if not (current_app.conf.broker_url or current_app.conf.broker_write_url):
        raise TaskNotSent(
            f"{stored.handler} cannot be sent: this process has no Celery app with a broker_url. Import it in the project's "
            "__init__.py."
        )
    try:
        send(current_app, current_app.signature(signature))
    except Exception as error:
        raise TaskNotSent(f"{stored.handler} cannot be sent: {describe(error)}") from error

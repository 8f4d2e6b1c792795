"""Operators' decisions about stored messages: retry, override, skip. Of one message or of many, by the same guarded change.

A decision locks a row, checks its state, changes it and records that, in one transaction. Many rows are changed by one
statement for each state that they have. A row in an order, a running message and a Celery task are decided one by one:
another row is promoted, a lease store is asked, or the task is sent again.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from django.db import OperationalError, connections, transaction
from django.db.models import QuerySet

from exactly_once.sql.connections import is_postgresql, lock_timeout
from exactly_once.sql.days import LIVE
from exactly_once.sql.faults import SERIALIZATION_FAILURE, is_collision, sqlstate_of
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.operation_rows import RowOutcome, one_by_one
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
LOCKED = "a process is working on it"

_NAMED = ("handler", "topic", "key", "ordered", "place", "state", "quarantined", "message_id", "biz_id")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A transition that an operator has decided.

    Attributes:
        sources: the states that allow it.
        written: the columns that it changes.
        reason: for the trail.
        quarantined: whether the maximum message age must have refused the message; None: it does not matter.
    """

    sources: Collection[str]
    written: Mapping[str, Any]
    reason: str
    quarantined: bool | None = None

    def why_not(self, message: InboxMessage) -> str:
        """Why this message's state does not allow it; "" if it does."""
        if message.state not in self.sources:
            return f"it is {message.get_state_display().lower()} now"
        if self.quarantined is not None and message.quarantined != self.quarantined:
            return "it is in quarantine" if message.quarantined else "it is not in quarantine"
        return ""


def retrying(reason: str, *, sources: Collection[str] = RETRY.sources, after: timedelta = timedelta()) -> Decision:
    """See `retry`."""
    written = {**RETRY.columns, "next_attempt_at": DatabaseTime(after)}
    return Decision(sources=sources, written=written, reason=reason, quarantined=False)


def overriding(reason: str) -> Decision:
    """See `override_maximum_age`."""
    recorded = "; ".join(filter(None, ("the maximum message age was overridden", reason)))
    written = {**OVERRIDE.columns, "next_attempt_at": DatabaseTime()}
    return Decision(sources=OVERRIDE.sources, written=written, reason=recorded, quarantined=True)


def skipping(reason: str, *, by: str = "", sources: Collection[str] = SKIP.sources) -> Decision:
    """See `skip`."""
    return Decision(sources=sources, written=skipped(reason), reason="; ".join(filter(None, (reason, by))))


def skipped(reason: str) -> Mapping[str, Any]:
    return {**SKIP.columns, "last_error": printable(f"skipped: {reason}", ERROR_LENGTH)}


def retry(alias: str, row: int, *, reason: str = "", after: timedelta = timedelta()) -> bool:
    """dead | retrying | received → retrying, due `after` a delay, with a full set of attempts. False: in none of these states.

    running, past its lease → running, due now; its owner can settle nothing. False also if the maximum message age has
    refused it, see `override_maximum_age`. While a handler is running the message, this waits for up to ten seconds. In an
    order the message is `waiting` while another precedes it. A Celery task is sent again, because the inbox does not run it.

    Args:
        reason: for the trail: the operator.

    Raises:
        TaskNotSent, LeaseStoreUnavailable: nothing was changed.
    """
    return decide(alias, row, retrying(reason, after=after))


def override_maximum_age(alias: str, row: int, *, reason: str = "") -> bool:
    """dead, refused by the maximum message age → retrying, due now. False: it is in another state.

    The operator asserts that it has not been handled before. From then on it is a normal message, and further copies are
    duplicates.

    Args:
        reason: for the trail: the operator and the reason.

    Raises:
        TaskNotSent: nothing was changed.
    """
    return decide(alias, row, overriding(reason))


def skip(alias: str, row: int, reason: str, *, by: str = "") -> bool:
    """dead | retrying | received | waiting → skipped: its effect will not happen. False: it is in none of these states.

    running, past its lease → skipped; its owner can settle nothing. While a handler is running the message, this waits for up
    to ten seconds. In an order the next message is promoted.

    Args:
        reason: stored in the row and in the trail.
        by: for the trail: the operator.

    Raises:
        LeaseStoreUnavailable: nothing was changed.
    """
    return decide(alias, row, skipping(reason, by=by))


def decide(alias: str, row: int, decision: Decision) -> bool:
    """Make the transition of one message. False: its state does not allow it, or a process is working on it."""
    try:
        with waiting_for_locks(alias):
            rows = (
                InboxMessage.objects.using(alias)
                .filter(pk=row, day=LIVE)
                .exclude(state=State.RUNNING, next_attempt_at__gt=DatabaseTime())
            )
            message = rows.select_for_update().only(*_NAMED).first()
            if message is None or decision.why_not(message) or (message.state == State.RUNNING and _is_leased(alias, row)):
                return False
            _write(alias, message, decision)
            _remember_longer(alias, [row], decision)
            if decision.written["state"] == State.RETRYING and _is_task(message):
                _resend(alias, row)
            return True
    except OperationalError as error:
        if is_collision(error):
            return False
        raise


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
def decide_many(alias: str, rows: Sequence[int], decision: Decision) -> list[RowOutcome]:
    """Make the transition of these messages. Those that another transaction has locked are not waited for."""
    messages = InboxMessage.objects.using(alias).only(*_NAMED).order_by("pk")
    changed: dict[str, list[int]] = {}
    unchanged: dict[int, str] = {}
    one_at_a_time: list[int] = []
    with transaction.atomic(using=alias):
        lockable = messages.filter(pk__in=rows, day=LIVE).select_for_update(skip_locked=is_postgresql(connections[alias]))
        found = {message.pk: message for message in lockable}
        for row, message in found.items():
            if why := decision.why_not(message):
                unchanged[row] = why
            elif message.state == State.RUNNING or message.ordered or _is_task(message):
                one_at_a_time.append(row)
            else:
                changed.setdefault(message.state, []).append(row)
        for state, together in changed.items():
            update(alias, _live(alias, together), decision.written, was=state, reason=decision.reason)
            _remember_longer(alias, together, decision)
    if missing := [row for row in rows if row not in found]:
        days = {*receipts.days_of(alias, missing).values()}
        others = {message.pk: message for message in messages.filter(pk__in=missing, day__in=days)}
        for row in missing:
            settled = row in others and decision.why_not(others[row])
            unchanged[row] = settled or (LOCKED if row in others else "it no longer exists")
        found |= others
    names = {row: _name(message) for row, message in found.items()}
    outcomes = [RowOutcome(row, names[row]) for together in changed.values() for row in together]
    outcomes += [RowOutcome(row, names.get(row, f"number {row}"), why) for row, why in unchanged.items()]
    return outcomes + one_by_one(alias, one_at_a_time, partial(_decide_named, alias, names, decision), refusals=REFUSALS)


def _decide_named(alias: str, names: Mapping[int, str], decision: Decision, row: int) -> RowOutcome:
    if decide(alias, row, decision):
        return RowOutcome(row, names[row])
    message = receipts.message(alias, row).only("state").first()
    now = message and f"it is {message.get_state_display().lower()} now, and a process may be working on it"
    return RowOutcome(row, names[row], now or "it no longer exists")


def _remember_longer(alias: str, rows: Sequence[int], decision: Decision) -> None:
    """Keep the receipts of messages that are run now for `RETENTION` from now on: one that was dead may be as old as that."""
    if decision.written["state"] == State.RETRYING:
        Receipt.objects.using(alias).filter(pk__in=rows).update(received_at=DatabaseTime())


def _name(message: InboxMessage) -> str:
    return f"{message.message_id} ({message.topic} {message.biz_id}, {message.handler})"


def _is_task(message: InboxMessage) -> bool:
    return message.handler == message.topic and message.topic.startswith(CELERY_TOPICS)


def _is_leased(alias: str, row: int) -> bool:
    """Has the lease of a running message not ended according to its store? That may have extended it without the row."""
    return lease_store(inbox_options()).is_held(alias, stored_row(_live(alias, [row]).get()))


@contextmanager
def waiting_for_locks(alias: str) -> Iterator[None]:
    """The transaction of a decision, which waits for a row for up to ten seconds."""
    with deciding(alias), lock_timeout(alias, OPERATORS_WAIT):
        yield


def _live(alias: str, rows: Sequence[int]) -> QuerySet[InboxMessage]:
    return InboxMessage.objects.using(alias).filter(pk__in=rows, day=LIVE)


def _write(alias: str, message: InboxMessage, decision: Decision) -> None:
    written = decision.written
    write = partial(update, alias, _live(alias, [message.pk]), was=message.state, reason=decision.reason)
    if message.state == State.RUNNING and written["state"] == State.RETRYING:
        # Only its lease store knows whether it has been run, so it stays running until its next owner has the lease.
        written = {**written, "state": State.RUNNING}
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

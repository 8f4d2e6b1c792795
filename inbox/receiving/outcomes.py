"""The outcome of a delivery: stored, logged and announced by a signal. The other modules of `receiving` run the handler."""

import logging
import traceback
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from django.db import DatabaseError, InterfaceError
from django.dispatch import Signal

from exactly_once.conf.settings import redacted_error
from exactly_once.failures import DEFERRED, NEVER_ENDED, RAN_FOR, class_of, own_frames, place_of
from exactly_once.process.logs import escaping_logger
from exactly_once.sql.faults import SERIALIZATION_FAILURE, is_collision, sqlstate_of
from exactly_once.wire.retry import RetryPolicy
from exactly_once.wire.text import describe
from inbox import metrics, signals
from inbox.conf import InboxOptions
from inbox.errors import Reject, RetryLater, TransactionEnded
from inbox.handlers.handler import Handler
from inbox.handlers.options import Retry, require_value
from inbox.models import InboxMessage
from inbox.receiving.reading import message_for, stored_arrival
from inbox.states import Outcome, State
from inbox.store import arrivals, claims, counting, dialect, duplicates, message_rows
from inbox.store.arrivals import Admitted
from inbox.store.message_rows import ConcurrentDuplicate, DuplicateCause, Earlier, Failure, NewRow, order_of
from inbox.transactions.arrival import Arrival
from inbox.transactions.running import TRIES_AT_ONCE, DatabaseUnavailable, committed

logger = escaping_logger(__name__)

_SHORTEST_DELAY = timedelta(seconds=1)


def store_failure(handler: Handler, row: NewRow, failure: Failure, options: InboxOptions) -> Outcome:
    if failure.is_stored:
        return announce(handler.using, row, failure)
    try:
        new = committed(handler.using, arrivals.store_failed, row, failure, options.DUPLICATE_TIMEOUT)
    except DatabaseError as error:
        # The values of its row are the cause; the new row has only the body.
        row, failure = message_rows.undecoded(row), Failure(error=unfit(error), retry_after=None, attempts=0)
        new = committed(handler.using, arrivals.store_failed, row, failure, options.DUPLICATE_TIMEOUT)
    if not new:
        return duplicate(handler, row)
    return announce(handler.using, row, failure)


def fail_stored(handler: Handler, stored: InboxMessage, failure: Failure) -> Outcome:
    if failure.is_stored:
        return announce(handler.using, stored, failure)
    leaves = order_of(stored) if handler.skips_dead and failure.retry_after is None else None
    ours: bool | None = None
    with suppress(ConcurrentDuplicate):
        ours = committed(handler.using, claims.fail_stored, stored, failure, leaves=leaves)
    if ours:
        return announce(handler.using, stored, failure)
    logger.warning("%s: message %s failed, which is not stored: %s", handler.name, stored.message_id, failure.error)
    return defer_locked(handler, stored) if ours is None else Outcome.DUPLICATE


def fail_exhausted(handler: Handler, stored: InboxMessage, options: InboxOptions, *, grace: int = 0) -> Outcome | None:
    """Make a claimed message a dead letter if its earlier attempts have used up its attempts; None if they have not.

    Args:
        grace: further attempts. The last one never ended, and may not have begun: the answer to its claim may have been lost.
    """
    made, most = stored.attempts - 1, handler.retry.most_attempts(options.retry)
    if made and handler.retry_for:
        most = most_attempts_of(stored_arrival(handler, stored), made, options)
    if made < most + grace:
        return None
    error = stored.last_error or f"Its attempts never ended: {handler.kind.never_ended}."
    failure = Failure(
        error=error,
        error_class=stored.error_class or NEVER_ENDED,
        error_place=stored.error_place,
        retry_after=None,
        attempts=made,
    )
    return fail_stored(handler, stored, failure)


def defer_locked(handler: Handler, stored: InboxMessage) -> Outcome:
    """Leave a claimed message whose row another session has locked; it is due again after REDELIVERY_AFTER."""
    logger.warning(
        "%s: message %s (biz-id %s) is deferred: another session has locked row %d of %s. It is due again after "
        "INBOX['REDELIVERY_AFTER'], with this attempt counted. End that session if it does not end by itself.",
        handler.name,
        stored.message_id,
        stored.biz_id,
        stored.pk,
        dialect.TABLE,
    )
    return Outcome.STORED


def unfit(error: DatabaseError) -> str:
    """The reason for storing only the body of a message; in ASCII, because the database may have refused a character."""
    text_of_error = describe(error).encode("ascii", "backslashreplace").decode()
    return f"The database refuses its values: {text_of_error}. Only its body is stored."


def duplicate(handler: Handler, row: NewRow) -> Outcome:
    return _duplicate_of(handler, row, committed(handler.using, duplicates.count_duplicate, row))


def admitted(handler: Handler, arrival: Arrival, became: Admitted, why_shed: str = "") -> Outcome:
    """The outcome of a delivery that was stored before it is handled."""
    row = arrival.row
    if not isinstance(became, State):
        return _duplicate_of(handler, row, became)
    if became is State.DEAD:
        return announce(handler.using, row, refusal(arrival))
    if became is State.SHED:
        metrics.SHED.add(1, handler.name)
        send(signals.message_shed, **_names(row), reason=why_shed)
        return Outcome.SHED
    return Outcome.STORED


def _duplicate_of(handler: Handler, row: NewRow, earlier: Earlier | None) -> Outcome:
    """The outcome of a duplicate of `earlier`; None: another transaction is running that row, or it was deleted."""
    if earlier is None:
        return Outcome.DEFERRED
    announce_duplicate(handler, row, earlier)
    return Outcome.DUPLICATE


def refusal(arrival: Arrival) -> Failure:
    return Failure(error=arrival.refused, retry_after=None, attempts=0, quarantined=arrival.quarantined)


def failure_of(
    arrival: Arrival, error: BaseException, attempt: int, options: InboxOptions, *, row: int | None = None
) -> Failure:
    """The failure of an attempt that raised `error`.

    Args:
        row: the message's row, if it was stored before this attempt.
    """
    return redacted(_decided(arrival, error, attempt, options, row), options)


def most_attempts_of(arrival: Arrival, made: int, options: InboxOptions) -> int:
    """The maximum attempts of this message, of which so many were made."""
    handler, stored = arrival.handler, arrival.stored
    most = handler.retry.most_attempts(options.retry)
    # If none of them is known to have ended, its body may be what ends the process, so that it cannot be read again and again.
    if handler.retry_for and (made < most or (stored is not None and (stored.failures or stored.state == State.RETRYING))):
        most = retry_of(arrival, options).most_attempts(options.retry)
    return most


def retry_of(arrival: Arrival, options: InboxOptions) -> Retry:
    """The retry policy of this message; that of the settings, if its handler's function fails."""
    handler = arrival.handler
    if handler.retry_for is None:
        return handler.retry
    try:
        retry = handler.retry_for(message_for(arrival, options))
        require_value("retry", retry, Retry, "Retry(max_attempts=5)")
    except BaseException as error:  # noqa: BLE001 - the user's code, see `receive.run`
        logger.warning(
            "%s: the function retry= failed for message %s, and the settings of INBOX apply to it: %s: %s",
            handler.name,
            arrival.row.message_id,
            type(error).__name__,
            describe(error),
        )
        return handler.retry
    return retry


def redacted(failure: Failure, options: InboxOptions) -> Failure:
    """The failure with the texts that may be stored and shown."""
    path = options.redact_errors
    if not path:
        return failure
    return replace(
        failure,
        error=redacted_error(path, failure.error),
        own_frames=redacted_error(path, failure.own_frames),
        traceback=redacted_error(path, failure.traceback),
    )


def _decided(arrival: Arrival, error: BaseException, attempt: int, options: InboxOptions, row: int | None) -> Failure:
    handler = arrival.handler
    policy = (handler.retry if handler.retry_for is None else retry_of(arrival, options)).after(error, options.retry)
    if isinstance(error, RetryLater):
        return _deferral(error, attempt, policy, _age(handler, row))
    if is_collision(error) or isinstance(error, DatabaseUnavailable):
        # The handler is not the cause: no attempt is counted. Only a wait for a lock, or for a database, may be as long again.
        beside = getattr(error, "beside", "")
        cause = f"the database {beside!r} was unavailable" if beside else "a database was unavailable"
        if is_collision(error):
            cause = f"collided with other transactions {TRIES_AT_ONCE} times"
        delay = _SHORTEST_DELAY if sqlstate_of(error) == SERIALIZATION_FAILURE else policy.delay(1)
        return failure_from(error, error=f"{cause}: {describe(error)}", retry_after=delay, attempts=attempt - 1)
    if isinstance(error, Reject):
        return failure_from(error, error=f"rejected: {describe(error)}", retry_after=None, attempts=attempt)
    text = f"{type(error).__name__}: {describe(error)}"
    last = isinstance(error, TransactionEnded) or policy.exhausted(attempt)
    return failure_from(
        error,
        error=text,
        retry_after=None if last else policy.delay(attempt),
        attempts=attempt,
        is_stored=isinstance(error, TransactionEnded) and error.is_stored,
    )


def failure_from(raised: BaseException, **outcome: Any) -> Failure:
    """The failure of an attempt that raised this exception, with its class, place and traceback."""
    return Failure(
        error_class=class_of(raised),
        error_place=place_of(raised),
        own_frames=own_frames(raised),
        traceback="".join(traceback.format_exception(raised)),
        seconds=getattr(raised, RAN_FOR, None),
        **outcome,
    )


def _deferral(error: RetryLater, attempt: int, policy: RetryPolicy, age: timedelta) -> Failure:
    """The handler deferred the message, `age` after it arrived."""
    shown = timedelta(seconds=int(age.total_seconds()))
    delay = policy.delay(attempt) if error.delay is None else error.delay
    if error.give_up_after is not None:
        left = error.give_up_after - age
        if left <= timedelta():
            text = f"given up {shown} after it arrived, because of RetryLater(give_up_after={error.give_up_after!r})"
            return failure_from(error, error=f"{text}: {describe(error)}", retry_after=None, attempts=attempt)
        # The last attempt is made when `give_up_after` has passed.
        delay = min(delay, left)
    text = f"deferred, {shown} after it arrived: {describe(error)}" if shown else f"deferred: {describe(error)}"
    return Failure(
        error=text,
        error_class=DEFERRED,
        error_place=place_of(error),
        retry_after=max(delay, _SHORTEST_DELAY),
        attempts=attempt - 1,
        deferred=True,
    )


def _age(handler: Handler, row: int | None) -> timedelta:
    """The time since a stored message arrived; zero for a new one, or if the database fails."""
    if row is None:
        return timedelta()
    try:
        return committed(handler.using, claims.age, row)
    except (DatabaseUnavailable, DatabaseError, InterfaceError) as failed:
        logger.debug("%s: the age of row %d is unknown: %s", handler.name, row, describe(failed))
        return timedelta()


def announce(alias: str, row: NewRow | InboxMessage, failure: Failure) -> Outcome:
    handler, name = row.handler, row.message_id or "without id"
    counting.count_failure(alias, handler, failure)
    dead = failure.retry_after is None
    (metrics.DEFERRALS if failure.deferred else metrics.FAILED_ATTEMPTS).add(1, handler)
    if dead:
        metrics.DEAD.add(1, handler)
        level, fate = logging.ERROR, f"is a dead letter after attempt {failure.attempts}"
    else:
        # A deferral is not a failure.
        level = logging.INFO if failure.deferred else logging.WARNING
        backoff = failure.retry_after or timedelta()
        fate = f"is tried again in {backoff.total_seconds():.0f} s"
    place = f" ({failure.error_place})" if failure.error_place and not failure.deferred else ""
    logger.log(level, "%s: message %s (biz-id %s) %s: %s%s", handler, name, row.biz_id, fate, failure.error, place)
    send(signals.message_dead if dead else signals.message_retrying, **_names(row), error=failure.error)
    return Outcome.DEAD if dead else Outcome.STORED


def announce_duplicate(handler: Handler, row: NewRow, earlier: Earlier) -> None:
    counting.count_duplicate(handler.using, handler.name, earlier.cause)
    names = _names(row)
    if earlier.conflicting:
        logger.error(
            "%(handler)s: message %(message_id)s has the biz-id %(biz_id)s of an earlier message, but other content. It was "
            "not run. If it is another fact, run it as its own message in the admin, and correct %(wrong)s.",
            {**names, "wrong": "biz_id= of the handler" if handler.biz_id else "its publisher, or set biz_id= of the handler"},
        )
        metrics.CONFLICTS.add(1, handler.name)
        send(signals.conflicting_duplicate, **names)
    the_same = earlier.cause in {DuplicateCause.REDELIVERY, DuplicateCause.RESEND}
    if earlier.state == State.DEAD and not the_same:
        logger.error(
            "%(handler)s: message %(message_id)s has the biz-id %(biz_id)s of a dead letter, and was not run. Retry or skip "
            "the dead letter to decide about both.",
            names,
        )
    metrics.DUPLICATES.add(1, handler.name, earlier.cause.value)
    send(signals.duplicate_suppressed, cause=earlier.cause.value, **names)


def _names(row: NewRow | InboxMessage) -> dict[str, str]:
    return {"handler": row.handler, "topic": row.topic, "message_id": row.message_id, "biz_id": row.biz_id}


def send(signal: Signal, **arguments: Any) -> None:
    try:
        signal.send_robust(sender=InboxMessage, **arguments)
    except BaseException:
        # send_robust lets SystemExit through, and the state is committed.
        logger.exception("inbox: a signal receiver raised an exception that would end the process; it is ignored.")

"""One delivery of a Celery task, taken through the inbox's pipeline: the policy of tasks.

The pipeline (`inbox.receiving.receive`) runs a task as it runs a message. This policy differs in four ways:

- A failure is rolled back and raised, and leaves no row. Celery retries the task and acknowledges its message.
- An open row has no runner. The delivery that finds it runs it: after a worker died in the task, or after an operator's retry.
- The result is stored with the row, and a duplicate returns it.
- A delivery that cannot be run now is sent again as a copy with the same task id, before it is acknowledged. Each further copy
  comes later. If it were requeued, the broker would redeliver it at once, in a loop, and count that against it.
"""

import inspect
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NoReturn

from celery.exceptions import Ignore, Reject, Retry
from django.db import connections, transaction
from kombu.exceptions import EncodeError
from kombu.utils.json import loads

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.wire.retry import Pause, RetryPolicy
from exactly_once.wire.text import describe
from inbox.celery.calls import NO_RESULT, Call, as_sent, encode_result, read_call, signature_to_resend
from inbox.celery.sending import send
from inbox.conf import InboxOptions, inbox_options
from inbox.errors import NotRun, TransactionEnded
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.models import InboxMessage
from inbox.receiving.admit import admit
from inbox.receiving.in_hand import lost_sessions
from inbox.receiving.outages import make_refunds
from inbox.receiving.outcomes import fail_exhausted, fail_stored, failure_of
from inbox.receiving.receive import Policy, run
from inbox.states import DUE, Outcome, State
from inbox.store import claims, counting, handler_rows, receipts
from inbox.store.message_rows import ConcurrentDuplicate, Failure
from inbox.transactions.arrival import Arrival
from inbox.transactions.running import DatabaseUnavailable, committed

logger = escaping_logger(__name__)

_LONGEST_DEFERRAL = timedelta(minutes=5)
_DEFERRALS = "inbox_deferrals"
"""The header that counts how often a task was sent again because it could not be run."""
_PICKLE = {"pickle", "application/x-python-serialize"}
_requeue_pause = Pause()
_record_at: dict[tuple[str, str], float] = {}


class Requeued(Reject):  # type: ignore[misc] # celery is not typed
    """This delivery cannot be run now and is returned to the broker."""


REFUSALS = (NotRun, Requeued)
"""Not failures, whatever `autoretry_for` says. A Requeued that cannot be sent as a retry would be a lost message."""


def receive_task(
    task: Any,
    function: Callable[..., Any],
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    using: str,
    sent_at: datetime | None,
) -> object:
    """Process one delivery; returns the result of the task, from this run or from the earlier one.

    Raises:
        NotRun: the inbox does not run it.
        Ignore: it cannot be run now, and a copy was sent.
        Requeued: it cannot be run now, and no copy could be sent.
        Exception: what the task raised; its effect is rolled back.
    """
    options = inbox_options()
    call = read_call(task, function, signature, (args, kwargs), options, using=using, sent_at=sent_at)
    policy = TaskPolicy(call, options)
    try:
        make_refunds(call.handler.using)
        _record_period(call.handler)
        received = policy.receive()
        return policy.returned if received is Outcome.HANDLED else _earlier_result(call, received)
    except ConcurrentDuplicate:
        _defer(call, options.DUPLICATE_TIMEOUT, "another delivery of its business id is being run")
    except DatabaseUnavailable as outage:
        _defer(call, options.retry.base, f"the database is unavailable ({describe(outage)})")


def _record_period(handler: Handler) -> None:
    """Celery's workers have no housekeeping, and other processes do not know their tasks."""
    name = handler.using, handler.name
    if monotonic() >= _record_at.get(name, -math.inf) and not connections[handler.using].in_atomic_block:
        committed(handler.using, handler_rows.record_periods, [handler.name])
        _record_at[name] = monotonic() + handler_rows.CONFIRMED_EVERY.total_seconds()


class TaskPolicy(Policy):
    """The policy of one delivery of a task.

    Attributes:
        returned: the result of the task, once it was run.
    """

    default_result = NO_RESULT

    def __init__(self, call: Call, options: InboxOptions) -> None:
        super().__init__(call.handler, options)
        self.call = call
        self.attempt = call.message.attempt
        self.durable = not call.eager
        self.returned: object = None
        self._began_at = monotonic()

    def receive(self) -> Outcome:
        arrival = self.call.arrival
        if not (
            arrival.refused or arrival.row.redelivered or (lost_sessions.counts and lost_sessions.are_among([arrival.row]))
        ):
            return (run(self, [arrival]) or [Outcome.DEFERRED])[0]
        if received := self._run_open_row():
            return received
        (received,) = admit(self.handler, [arrival], self.options)
        if received is Outcome.STORED:
            return self._run_open_row() or received
        return received

    def message_for_run(self, arrival: Arrival) -> Message:
        return self.call.message

    def encode_result(self, returned: object) -> str | None:
        self.returned = returned
        return encode_result(returned)

    def settle_success(self, messages: Sequence[Message]) -> None:
        # An eager task may be part of its caller's transaction; otherwise both are called at once.
        for announce in (partial(super().settle_success, messages), self._time):
            transaction.on_commit(announce, using=self.handler.using, robust=True)

    def failure(self, arrival: Arrival, stored: InboxMessage, error: BaseException) -> None:
        """Celery decides what comes next."""

    def settle_failure(self, arrival: Arrival, error: BaseException) -> NoReturn:
        if arrival.stored is not None:
            # An error that ends the process counts as an attempt, or its task would be redelivered forever.
            if isinstance(error, Exception):
                self._settle_stored_failure(arrival.stored, error)
        elif isinstance(error, TransactionEnded):
            # Its effect may be partial, so Celery must not run it again.
            super().settle_failure(arrival, error)
            committed(self.handler.using, self._store_signature)
        else:
            self._count_failure(error)
        raise error

    def _store_signature(self, alias: str) -> None:
        """Store how the task was sent, after its row has become a dead letter."""
        row, headers = self.call.arrival.row, as_sent(self.call.task, *self.call.arguments())
        receipts.open_message(alias, row).filter(message_id=row.message_id).update(headers=json.loads(headers))

    def _settle_stored_failure(self, stored: InboxMessage, error: Exception) -> None:
        try:
            self._decide(stored, error)
        except DatabaseUnavailable as outage:
            logger.warning(
                "%s: task %s failed, and its row stays open because the database is unavailable (%s). The next delivery of its "
                "business id runs it.",
                self.handler.name,
                self.call.message.id,
                describe(outage),
            )

    def settle_duplicate(self, arrival: Arrival) -> Outcome:
        return (None if arrival.stored else self._run_open_row()) or super().settle_duplicate(arrival)

    def _run_open_row(self) -> Outcome | None:
        """Run the stored row of this task; None if there is none, if it is not open, or if it is being run."""
        row = self.call.arrival.row
        stored = committed(self.handler.using, claims.claim_task, row, self.options.REDELIVERY_AFTER)
        if stored is None:
            return None
        if exhausted := fail_exhausted(self.handler, stored, self.options):
            return exhausted
        (received,) = run(self, [replace(self.call.arrival, stored=stored)]) or [Outcome.DEFERRED]
        return received

    def _decide(self, stored: InboxMessage, error: Exception) -> None:
        ended = isinstance(error, TransactionEnded)
        if stored.state == State.RECEIVED and not ended:
            self._count_failure(error)
            committed(self.handler.using, claims.delete_task, stored)
        elif ended or not _celery_retries(self.call.task, error):
            # It ended its transaction, or an operator had sent it again, who must see that it failed.
            failure = failure_of(self.call.arrival, error, stored.attempts, self.options)
            fail_stored(self.handler, stored, replace(failure, retry_after=None, deferred=False))
        else:
            self._count_failure(error)

    def _count_failure(self, error: BaseException) -> None:
        """Count an attempt of which only Celery knows what comes next. `Ignore` and `Reject` are decisions of the task."""
        if isinstance(error, Exception) and not isinstance(error, Ignore | Reject):
            failure = Failure(error="", retry_after=timedelta(), attempts=1, deferred=isinstance(error, Retry))
            counting.count_failure(self.handler.using, self.handler.name, failure)

    def _time(self) -> None:
        """Count the latencies of a task that was run."""
        seconds, envelope = monotonic() - self._began_at, self.call.arrival.envelope
        due = (envelope.deliver_at or self.call.message.created_at) if self.attempt == 1 else None
        counting.time_received(self.handler.using, self.handler.name, [(due, seconds, True)])


def _celery_retries(task: Any, error: Exception) -> bool:
    """Will Celery retry this task or have it requeued? As `celery.app.autoretry` decides afterwards."""
    if isinstance(error, Ignore | Retry):
        return isinstance(error, Retry)
    if isinstance(error, Reject) and error.requeue:
        return True
    excepted, retried = (tuple(getattr(task, name, ())) for name in ("dont_autoretry_for", "autoretry_for"))
    if isinstance(error, excepted) or not isinstance(error, retried):
        return False
    most = getattr(task, "override_max_retries", getattr(task, "retry_kwargs", {}).get("max_retries"))
    most = task.max_retries if most is None else most
    return most is None or task.request.retries < most


def _earlier_result(call: Call, received: Outcome) -> object:
    """The stored result of a task that this delivery has not run.

    Raises:
        NotRun: its effect has not happened, and only an operator can run it; or its result is unknown and awaited.
        ConcurrentDuplicate: it is being run, or is due.
    """
    using, name, biz_id = call.handler.using, call.handler.name, call.message.biz_id
    earlier = None
    if received is not Outcome.DEFERRED:
        earlier = committed(using, receipts.outcome_of_task, call.arrival.row)
    if earlier is None or earlier.state in DUE:
        raise ConcurrentDuplicate
    if earlier.state != State.DONE:
        raise NotRun(
            f"{name} was not run: its business id {biz_id!r} is {State(earlier.state).label.lower()} in the inbox "
            f"({earlier.last_error}). An operator decides whether it is run."
        )
    if earlier.result is None and call.awaited:
        raise NotRun(
            f"{name} has had its effect for the business id {biz_id!r}, but its result is not stored, so the task that needs "
            "it is not called: it was not JSON, or is older than INBOX['KEEP_HISTORY']. Return JSON from tasks that others "
            "wait for."
        )
    return None if earlier.result is None else loads(earlier.result)


def _defer(call: Call, first: timedelta, why: str) -> NoReturn:
    """Send a copy of this delivery, with its task id, to be run later; Celery counts no retry.

    Args:
        first: the countdown of the first copy; that of each further copy is twice as long.
    """
    if call.eager:
        raise NotRun(f"{call.handler.name} was not run: {why}.")
    try:
        signature = signature_to_resend(call.task, *call.arguments())
        headers = signature.options.get("headers") or {}
        deferrals = headers[_DEFERRALS] + 1 if isinstance(headers.get(_DEFERRALS), int) else 1
        delay = RetryPolicy(max_attempts=1, base=first, factor=2.0, cap=_LONGEST_DEFERRAL).delay(deferrals)
        # On quorum queues Celery delays by whole seconds, at least one.
        countdown = math.ceil(delay.total_seconds())
        _send_copy(call.task.app, signature.set(headers={**headers, _DEFERRALS: deferrals}, countdown=countdown))
    except Exception as error:
        # The broker redelivers it at once.
        time.sleep(_requeue_pause.next_seconds())
        raise Requeued(f"{why}, and it cannot be sent again: {describe(error)}", requeue=True) from error
    _requeue_pause.reset()
    logger.info("%s: task %s is sent again with a countdown of %d s: %s.", call.handler.name, call.message.id, countdown, why)
    raise Ignore(why)


def _send_copy(app: Any, signature: Any) -> None:
    try:
        send(app, signature)
    except EncodeError:
        # A request does not name the serializer of its message. That of the task class cannot represent these arguments.
        if not _PICKLE & {*app.conf.accept_content}:
            raise
        send(app, signature.set(serializer="pickle"))

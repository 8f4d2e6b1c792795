"""One delivery of a Celery task, one transaction: what `receiving` is for messages.

*Fast path*, a fresh delivery: inbox row, effect, sentinel, commit; a failure rolls back all of it and goes out to Celery, which
knows what to do with it. *Careful path*, a delivery that the broker has made before: the attempt is counted in a commit of its
own first, so that a task which kills its worker ends as a dead letter. A delivery whose effect has happened answers as the
first did.

A task whose concurrent duplicate is at work, or whose database is unavailable, comes again as a copy with the same task id,
later each time, sent before this one is acknowledged. Requeueing would have the broker deliver it at once, again and again, and
count that against it.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NoReturn

from celery.exceptions import Ignore, Reject, Retry
from django.db import transaction

from inbox.celery.calls import Call, as_sent, read_call, remembered, signature_to_resend, to_remember
from inbox.celery.sending import send
from inbox.conf import InboxOptions, inbox_options
from inbox.errors import NotRun, TransactionEnded
from inbox.models import DUE, InboxMessage, State
from inbox.receiving.outcomes import Received, announce, duplicate, fail_stored, failure_from, handled, store_failure
from inbox.store import arrivals, claims
from inbox.store.rows import ConcurrentDuplicate, Failure, Guard
from inbox.store.tasks import claim_met, forget, keep_how_sent, outcome
from inbox.transactions.handler_transaction import call as call_handler
from inbox.transactions.handler_transaction import in_transaction
from inbox.transactions.persistence import DatabaseUnavailable, committed, run_with_reruns
from outbox.kernel.failures import NEVER_ENDED
from outbox.kernel.retry import Pause, RetryPolicy
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)

_LONGEST_DEFERRAL = timedelta(minutes=5)
_DEFERRALS = "inbox_deferrals"
"""The header that counts how often a task was sent again because it could not be run."""
_put_back_pause = Pause()


class PutBack(Reject):  # type: ignore[misc] # celery is not typed
    """This delivery cannot be run now, and the broker is to keep it."""


REFUSALS = (NotRun, PutBack)
"""What `autoretry_for` must not take for a failure. It would make of a PutBack that cannot be sent again a lost message."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a task returned."""

    value: object


def receive_task(
    task: Any,
    function: Callable[..., Any],
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    sent_at: datetime | None,
) -> object:
    """Take one delivery to its end; what the task returned, now or when it was run.

    Raises:
        NotRun: it is not to be run.
        Ignore: a copy comes later.
        PutBack: it cannot be run now, and no copy could be sent.
        Exception: what the task raised; its effect is rolled back.
    """
    options = inbox_options()
    call = read_call(task, function, signature, (args, kwargs), options, sent_at=sent_at)
    try:
        return _receive(call, options).value
    except ConcurrentDuplicate:
        _come_again(call, options.DUPLICATE_TIMEOUT, "another delivery of the same business id is at work")
    except DatabaseUnavailable as error:
        _come_again(call, options.RETRY_BASE, f"the database is unavailable ({describe(error)})")


def _receive(call: Call, options: InboxOptions) -> Answer:
    if call.outside:
        _quarantine(call, options)
    elif call.redelivered:
        committed(lambda: arrivals.store_due(call.handler.using, call.row, options.DUPLICATE_TIMEOUT), call.handler.using)
    elif (answer := _run_fresh(call, options)) is not None:
        return answer
    # There is a row now. If it is open, this delivery has it.
    stored = committed(lambda: claim_met(call.handler.using, call.row, options.REDELIVERY_AFTER), call.handler.using)
    return _run_stored(call, stored, options) if stored else _answer_again(call)


def _run_fresh(call: Call, options: InboxOptions) -> Answer | None:
    try:
        return _run(
            call,
            lambda: arrivals.begin_fresh(call.handler.using, call.row, options.DUPLICATE_TIMEOUT, attempt=call.message.attempt),
            attempt=call.message.attempt,
        )
    except TransactionEnded as error:
        # Its effect may be there in part, and Celery must not begin it anew.
        store_failure(call.handler, call.row, _last_failure(error, call.message.attempt), options)
        committed(
            lambda: keep_how_sent(call.handler.using, call.row, as_sent(call.task, *call.arguments())), call.handler.using
        )
        raise


def _run_stored(call: Call, stored: InboxMessage, options: InboxOptions) -> Answer:
    attempt = stored.attempts
    if attempt > call.handler.retry.over(options.retry).max_attempts:
        error = f"It was begun {attempt - 1} times and never ended: its worker died, or lost its database."
        failure = Failure(error=error, error_class=NEVER_ENDED, retry_after=None, attempts=attempt - 1)
        fail_stored(call.handler, stored, failure)
        raise NotRun(f"{call.handler.name} is a dead letter now. {error}")
    try:
        answer = _run(
            call, lambda: claims.begin_stored(call.handler.using, stored.pk, attempt, was=stored.state), attempt=attempt
        )
    except (DatabaseUnavailable, ConcurrentDuplicate):
        raise
    # Not what ends the process: that counts, or a task that does it would come again for ever.
    except Exception as error:
        _let_go(call, stored, error)
        raise
    if answer is None:
        raise ConcurrentDuplicate
    return answer


def _run(call: Call, begin: Callable[[], Guard | None], *, attempt: int) -> Answer | None:
    """Inbox row, effect and sentinel in one transaction. None: there was nothing to begin."""
    returned: object = None

    def run() -> object:
        nonlocal returned
        returned = call_handler(call.handler, call.message, call.envelope)
        return returned

    ran = run_with_reruns(
        call.handler.using,
        lambda: in_transaction(
            call.handler,
            begin,
            run,
            of=call.message.id,
            attempt=attempt,
            durable=not call.eager,
            remember=to_remember,
        ),
        # Once for each task, and not again in each of its retries.
        reruns=attempt == 1 and not call.task.request.retries,
    )
    if not ran:
        return None
    transaction.on_commit(partial(handled, call.handler, call.message), using=call.handler.using)
    return Answer(returned)


def _quarantine(call: Call, options: InboxOptions) -> None:
    """Refuse it, unless the inbox knows it still.

    Raises:
        NotRun: it is a dead letter now.
    """
    failure = Failure(error=call.outside, retry_after=None, attempts=0, quarantined=True)
    using = call.handler.using
    if committed(lambda: arrivals.store_failed(using, call.row, failure, options.DUPLICATE_TIMEOUT), using):
        announce(call.handler, call.row.message_id, call.row.biz_id, failure)
        raise NotRun(f"{call.handler.name} was not run: {call.outside}")


def _let_go(call: Call, stored: InboxMessage, error: Exception) -> None:
    """An attempt on the careful path has failed in the ordinary way, and it is Celery's to say what comes next."""
    try:
        if isinstance(error, TransactionEnded):
            fail_stored(call.handler, stored, _last_failure(error, stored.attempts))
        elif stored.state == State.RECEIVED:
            committed(lambda: forget(call.handler.using, stored.pk, stored.attempts), call.handler.using)
        elif not _celery_tries_again(call.task, error):
            # An operator had sent it again, and wants to see what came of it.
            fail_stored(call.handler, stored, _last_failure(error, stored.attempts))
    except DatabaseUnavailable as outage:
        logger.warning(
            "%s: task %s failed, and its row stays open because the database is unavailable (%s). The next delivery of its "
            "business id runs it.",
            call.handler.name,
            call.message.id,
            describe(outage),
        )


def _celery_tries_again(task: Any, error: Exception) -> bool:
    """Will this very task come once more? As `celery.app.autoretry`, which is asked after us, will decide."""
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


def _last_failure(error: Exception, attempts: int) -> Failure:
    return failure_from(
        error,
        error=f"{type(error).__name__}: {describe(error)}",
        retry_after=None,
        attempts=attempts,
        is_stored=isinstance(error, TransactionEnded) and error.is_stored,
    )


def _answer_again(call: Call) -> Answer:
    """What the first delivery answered, for one whose effect has happened.

    Raises:
        NotRun: it has not, and will not without an operator; or its answer is not known, and another task waits for it.
        ConcurrentDuplicate: it is happening.
    """
    using, name = call.handler.using, call.handler.name
    if duplicate(call.handler, call.row, redelivered=call.redelivered) is Received.DEFERRED:
        raise ConcurrentDuplicate
    earlier = committed(lambda: outcome(using, call.row), using)
    if earlier is None or earlier.state in DUE:
        raise ConcurrentDuplicate
    if earlier.state != State.DONE:
        raise NotRun(
            f"{name} was not run: the inbox has its business id {call.row.biz_id!r} as {earlier.state.label.lower()} "
            f"({earlier.last_error}). An operator's retry runs it."
        )
    if earlier.result is not None:
        return Answer(remembered(earlier.result))
    if call.awaited:
        raise NotRun(
            f"{name} has had its effect for the business id {call.row.biz_id!r}, but what it returned was not JSON and is not "
            "known any more, so the task that waits for it is not called. Return JSON from tasks that others wait for."
        )
    return Answer(None)


def _come_again(call: Call, first: timedelta, why: str) -> NoReturn:
    """Send a copy of this delivery, with its task id, to come later; it counts as no retry.

    Args:
        first: after how long it comes when it was deferred for the first time; twice as long each further time.
    """
    if call.eager:
        raise NotRun(f"{call.handler.name} was not run: {why}.")
    try:
        signature, deferrals = _copy(call)
        rest = RetryPolicy(max_attempts=1, base=first, factor=2.0, cap=_LONGEST_DEFERRAL).delay(deferrals)
        # On quorum queues Celery delays by whole seconds and refuses less than one.
        countdown = math.ceil(rest.total_seconds())
        send(call.task.app, signature.set(countdown=countdown))
    except Exception as error:
        # The broker delivers it again at once.
        time.sleep(_put_back_pause.next_seconds())
        raise PutBack(f"{why}, and it cannot be sent again: {describe(error)}", requeue=True) from error
    _put_back_pause.reset()
    logger.info("%s: task %s comes again in %d s: %s.", call.handler.name, call.message.id, countdown, why)
    raise Ignore(why)


def _copy(call: Call) -> tuple[Any, int]:
    """The task as it came, and how often it has been deferred, this time included."""
    signature = signature_to_resend(call.task, *call.arguments())
    headers = signature.options.get("headers") or {}
    before = headers.get(_DEFERRALS)
    deferrals = before + 1 if isinstance(before, int) else 1
    return signature.set(headers={**headers, _DEFERRALS: deferrals}), deferrals

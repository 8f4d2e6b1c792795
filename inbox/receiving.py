"""One delivery, one handler, one transaction: the exactly-once half.

*Fast path*, a fresh delivery: insert the inbox row, call the handler, hit the sentinel, commit; the caller acknowledges after
that. *Careful path*, a delivery the broker has sent before: store it first, so that the attempt can be counted in a commit of
its own before the handler runs; a message that kills its process then runs out of attempts. Failed messages are stored, too,
and acknowledged: retries wait in the database, where people can see them.

Whatever happens, a delivery ends as one of `Received`; only PUT_OFF goes back to the broker.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.dispatch import Signal

from inbox import signals, store
from inbox.conf import InboxOptions
from inbox.errors import Reject, RetryLater, TransactionBroken, TransactionControl, TransactionEnded
from inbox.handlers import Handler, Message
from inbox.models import InboxMessage, State
from inbox.store import Earlier, Failure, Guard, NewRow, TwinBusy
from outbox.kernel.clock import utcnow
from outbox.kernel.context import Cause, caused_by
from outbox.kernel.databases import drop_unusable_connections
from outbox.kernel.envelope import Envelope, Undecodable, decode_payload, media_type
from outbox.kernel.faults import is_collision, is_outage
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

UNIDENTIFIED = "unidentified:"
"""Prefix of the biz-id of a delivery whose own could not be found; never given to a handler's own identities."""

_TRIES_AT_ONCE = 5
_SHORTEST_DELAY = timedelta(seconds=1)
_HAND_OVER_WAIT = timedelta(milliseconds=20)
"""How long the relay, which has others to hand over, waits for a twin."""
_TRANSACTION_CONTROL = re.compile(
    r"\s*(begin|commit|end|abort|start\s+transaction|prepare\s+transaction|rollback(?!\s+(work\s+|transaction\s+)?to\b))\b",
    re.IGNORECASE,
)
_WRITES = re.compile(r"\s*(insert|update|delete|merge|truncate)\b", re.IGNORECASE)


class Received(Enum):
    """What became of a delivery."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"
    STORED = "stored"
    """Its attempt failed, or it was put on the careful path; the database has it."""
    DEAD = "dead"
    PUT_OFF = "put off"
    """A twin has it in hand: not acknowledged, to be delivered again."""


class DatabaseAway(Exception):
    """The handler's database does not answer. Nothing was decided: do not acknowledge, wait, and receive again.

    Attributes:
        owed: what to do when it is back: give back an attempt that was counted and could not be made.
    """

    owed: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A delivery, read: the row it would be, and the message it carries.

    Attributes:
        refused: why it cannot be handled; then it is a dead letter from the start. "" when it can.
    """

    row: NewRow
    envelope: Envelope
    refused: str = ""


def read(handler: Handler, envelope: Envelope, options: InboxOptions, *, refused: str = "") -> Arrival:
    """Decide what this delivery is for `handler`, or say why it is `refused`. Nothing is written, nothing is raised."""
    digest = hashlib.sha256(envelope.body).hexdigest()
    nameless = hashlib.sha256(f"{envelope.dedup_id}\n{digest}".encode()).hexdigest()
    biz_id = UNIDENTIFIED + nameless
    if not refused:
        try:
            biz_id = _identify(handler, _message(envelope, options))
            refused = _outside_window(envelope, options)
        except Undecodable as error:
            refused = str(error)
    return Arrival(row=_row(handler, envelope, biz_id=biz_id, digest=digest), envelope=envelope, refused=refused)


def receive(handler: Handler, arrival: Arrival, options: InboxOptions, *, redelivered: bool) -> Received:
    """Take one delivery to its end.

    Raises:
        DatabaseAway: the database does not answer; nothing was decided.
    """
    try:
        if arrival.refused:
            return _store(handler, arrival.row, _refusal(arrival), options)
        if redelivered:
            return _receive_carefully(handler, arrival.row, options)
        return _receive_fresh(handler, arrival, options)
    except TwinBusy:
        return Received.PUT_OFF


def hand_over(handler: Handler, arrival: Arrival) -> None:
    """Store a delivery that has no broker, inside the caller's transaction, to be run by the runner.

    Raises:
        TwinBusy: its row is in a transaction's hands right now; roll back and hand over again.
    """
    if arrival.refused:
        failure = _refusal(arrival)
        if store.store_failed(handler.using, arrival.row, failure, _HAND_OVER_WAIT):
            _after_commit(handler, lambda: _announce(handler, arrival.row.message_id, arrival.row.biz_id, failure))
            return
    elif store.store_due(handler.using, arrival.row, _HAND_OVER_WAIT):
        return
    earlier = store.count_duplicate(handler.using, arrival.row)
    if earlier is None:
        raise TwinBusy
    _after_commit(handler, lambda: _announce_duplicate(handler, arrival.row, earlier))


def run_next(handlers: Sequence[Handler], alias: str, options: InboxOptions) -> Received | None:
    """Claim and run one stored message that is due on `alias`; None when there is none.

    Raises:
        DatabaseAway: the database does not answer.
    """
    known = {handler.name: handler for handler in handlers if handler.using == alias}
    try:
        drop_unusable_connections()
        stored = store.claim_due(alias, list(known), options.REDELIVERY_AFTER)
        return run_stored(known[stored.handler], stored, options) if stored else None
    except (DatabaseError, InterfaceError) as error:
        if is_collision(error):
            return None
        raise DatabaseAway(str(error)) from error


def run_stored(handler: Handler, stored: InboxMessage, options: InboxOptions) -> Received:
    """Run a stored message whose attempt has been claimed."""
    attempt = stored.attempts
    if attempt > options.MAX_ATTEMPTS:
        error = stored.last_error or "Its attempts were begun and never ended: its process died, or its database went away."
        return _fail_stored(handler, stored, Failure(error=error, retry_after=None, attempts=attempt - 1))
    envelope = _stored_envelope(stored)
    try:
        biz_id = _identify_late(handler, _message(envelope, options, needs_id=False), stored)
    except Undecodable as error:
        return _fail_stored(handler, stored, Failure(error=str(error), retry_after=None, attempts=attempt))
    if biz_id != stored.biz_id and not store.rekey(handler.using, stored.pk, biz_id):
        store.skip(handler.using, stored.pk, f"its biz-id is {biz_id}, and another message of that name is here already")
        return Received.DUPLICATE

    def run() -> Message | None:
        message = _message(envelope, options, needs_id=False, attempt=attempt, biz_id=biz_id)
        return _in_transaction(handler, message, envelope, lambda: store.begin_stored(handler.using, stored.pk, attempt))

    try:
        message = _persistently(handler.using, run)
    except DatabaseAway as away:
        away.owed = partial(store.give_back, handler.using, stored.pk, attempt)
        raise
    except BaseException as error:  # noqa: BLE001 - see _receive_fresh
        return _fail_stored(handler, stored, _failure(error, attempt, options))
    return _handled(handler, message) if message else Received.DUPLICATE


# ------------------------------------------------------------------------------------------------------------ the transaction


def _in_transaction(
    handler: Handler, message: Message, envelope: Envelope, begin: Callable[[], Guard | None]
) -> Message | None:
    """Inbox row, effect and sentinel in one transaction; `message`, or None when `begin` found nothing to do."""
    committed = False

    def mark() -> None:
        nonlocal committed
        committed = True

    cause = Cause(
        message_id=message.id,
        correlation_id=message.correlation_id or message.id,
        traceparent=envelope.traceparent,
    )
    try:
        with transaction.atomic(using=handler.using, durable=True):
            # The first hook of this transaction: whatever a later one raises, the effect is in.
            transaction.on_commit(mark, using=handler.using)
            guard = begin()
            if guard is None:
                return None
            try:
                with _supervised(handler), caused_by(cause):
                    handler.call(message)
            except BaseException:
                store.refuse_if_ended(guard)
                raise
            store.finish(guard, message.attempt)
        _refuse_if_uncommitted(handler.using, committed)
    except BaseException:
        if not committed:
            raise
        logger.exception("An on_commit hook of %s failed after the effect of %s was committed.", handler.name, message.id)
    return message


def _refuse_if_uncommitted(alias: str, committed: bool) -> None:
    """Somebody has switched autocommit off on this connection, and then leaving atomic() commits nothing."""
    if not committed and not connections[alias].in_atomic_block:  # as it still is in the transaction of a test
        connections[alias].close()
        raise TransactionBroken("The transaction ended without a commit: autocommit is off on this connection.")


@contextmanager
def _supervised(handler: Handler) -> Iterator[None]:
    """Keep the handler from ending our transaction by SQL, and warn about writes that are not in it."""

    def refuse_transaction_control(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        if isinstance(sql, str) and _TRANSACTION_CONTROL.match(sql):
            raise TransactionControl(
                f"The handler {handler.name} executed {sql.strip()[:40]!r}. Its effect and its inbox row must commit "
                "together: leave commit and rollback to the inbox, and use `transaction.atomic()` for savepoints."
            )
        return execute(sql, params, many, context)

    def warn_of_writes(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        if isinstance(sql, str) and _WRITES.match(sql):
            logger.warning(
                "The handler %s writes to the database %r. That is outside its transaction on %r and may happen twice.",
                handler.name,
                context["connection"].alias,
                handler.using,
            )
        return execute(sql, params, many, context)

    with ExitStack() as stack:
        for alias in connections:
            wrapper = refuse_transaction_control if alias == handler.using else warn_of_writes
            stack.enter_context(connections[alias].execute_wrapper(wrapper))
        yield


def _persistently(alias: str, attempt: Callable[[], _T]) -> _T:
    """Run a transaction again at once when it collided with another or lost its connection, a few times.

    Raises:
        DatabaseAway: the connection was lost and the database does not answer.
        Exception: what the transaction raised, or what it raised at the last try.
    """
    drop_unusable_connections()
    for tries_left in reversed(range(_TRIES_AT_ONCE)):
        try:
            return attempt()
        except Exception as error:
            lost = is_outage(error)
            if lost and not store.is_reachable(alias):
                raise DatabaseAway(str(error)) from error
            if not tries_left or not (lost or is_collision(error)):
                raise
        time.sleep(random.uniform(0, 0.02 * (_TRIES_AT_ONCE - tries_left)))
    raise AssertionError("unreachable")


# ------------------------------------------------------------------------------------------------------------------- outcomes


def _receive_fresh(handler: Handler, arrival: Arrival, options: InboxOptions) -> Received:
    def run() -> Message | None:
        # Decoded anew for every run: a handler may change its payload, and a collision makes it run again.
        message = _message(arrival.envelope, options, biz_id=arrival.row.biz_id)
        return _in_transaction(
            handler,
            message,
            arrival.envelope,
            lambda: store.begin_fresh(handler.using, arrival.row, options.TWIN_TIMEOUT),
        )

    try:
        message = _persistently(handler.using, run)
    except (DatabaseAway, TwinBusy):
        raise
    # Handlers run where no signal arrives, so even KeyboardInterrupt is the handler's own.
    except BaseException as error:  # noqa: BLE001
        return _store(handler, arrival.row, _failure(error, 1, options), options)
    return _handled(handler, message) if message else _duplicate(handler, arrival.row)


def _receive_carefully(handler: Handler, row: NewRow, options: InboxOptions) -> Received:
    if not decided(lambda: store.store_due(handler.using, row, options.TWIN_TIMEOUT), handler.using):
        return _duplicate(handler, row)
    return run_next([handler], handler.using, options) or Received.STORED


def _store(handler: Handler, row: NewRow, failure: Failure, options: InboxOptions) -> Received:
    if not decided(lambda: store.store_failed(handler.using, row, failure, options.TWIN_TIMEOUT), handler.using):
        return _duplicate(handler, row)
    return _announce(handler, row.message_id, row.biz_id, failure)


def _fail_stored(handler: Handler, stored: InboxMessage, failure: Failure) -> Received:
    ours = decided(lambda: store.fail_stored(handler.using, stored.pk, stored.attempts, failure), handler.using)
    if not ours:
        decided(lambda: store.note_error(handler.using, stored.pk, failure), handler.using)
        return _bury(handler, stored.pk, stored.message_id, stored.biz_id) or Received.DUPLICATE
    return _announce(handler, stored.message_id, stored.biz_id, failure)


def _duplicate(handler: Handler, row: NewRow) -> Received:
    earlier = decided(lambda: store.count_duplicate(handler.using, row), handler.using)
    if earlier is None:
        return Received.PUT_OFF
    if earlier.abandoned and (buried := _bury(handler, earlier.row, row.message_id, row.biz_id)):
        return buried
    _announce_duplicate(handler, row, earlier)
    return Received.DUPLICATE


def _bury(handler: Handler, pk: int, message_id: str, biz_id: str) -> Received | None:
    if not decided(lambda: store.bury_abandoned(handler.using, pk), handler.using):
        return None
    return _announce(handler, message_id, biz_id, Failure(error=store.ABANDONED, retry_after=None, attempts=1))


def decided(write: Callable[[], _T], alias: str) -> _T:
    """Write an outcome in a commit of its own.

    Raises:
        DatabaseAway: it could not be written, so nothing is decided.
    """
    try:
        return _persistently(alias, write)
    except (DatabaseError, InterfaceError) as error:
        if is_collision(error) or is_outage(error):
            raise DatabaseAway(str(error)) from error
        raise


def _refusal(arrival: Arrival) -> Failure:
    return Failure(error=arrival.refused, retry_after=None, attempts=0)


def _failure(error: BaseException, attempt: int, options: InboxOptions) -> Failure:
    if isinstance(error, RetryLater):
        rest = options.retry.delay(attempt) if error.delay is None else max(error.delay, _SHORTEST_DELAY)
        return Failure(error=f"put off: {describe(error)}", retry_after=rest, attempts=attempt - 1, put_off=True)
    trace = "".join(traceback.format_exception(error))
    if is_collision(error):
        # Nobody's fault, however often: it rests like after a failure and counts as no attempt.
        text = f"collided with other transactions {_TRIES_AT_ONCE} times: {describe(error)}"
        return Failure(error=text, traceback=trace, retry_after=options.retry.delay(1), attempts=attempt - 1)
    if isinstance(error, Reject):
        return Failure(error=f"rejected: {describe(error)}", traceback=trace, retry_after=None, attempts=attempt)
    text = f"{type(error).__name__}: {describe(error)}"
    last = isinstance(error, TransactionEnded) or options.retry.exhausted(attempt)
    return Failure(error=text, traceback=trace, retry_after=None if last else options.retry.delay(attempt), attempts=attempt)


def _announce(handler: Handler, message_id: str, biz_id: str, failure: Failure) -> Received:
    dead = failure.retry_after is None
    if dead:
        level, fate = logging.ERROR, f"is a dead letter after attempt {failure.attempts}"
    else:
        # What a handler put off is no failure.
        level = logging.INFO if failure.put_off else logging.WARNING
        rest = failure.retry_after or timedelta()
        fate = f"is tried again in {rest.total_seconds():.0f} s"
    logger.log(
        level, "%s: message %s (biz-id %s) %s: %s", handler.name, message_id or "without id", biz_id, fate, failure.error
    )
    _tell(
        signals.message_dead if dead else signals.message_retrying,
        handler=handler.name,
        message_id=message_id,
        error=failure.error,
    )
    return Received.DEAD if dead else Received.STORED


def _announce_duplicate(handler: Handler, row: NewRow, earlier: Earlier) -> None:
    names = {"handler": handler.name, "message_id": row.message_id, "biz_id": row.biz_id}
    if earlier.conflicting:
        logger.error(
            "Message %(message_id)s for %(handler)s has the biz-id %(biz_id)s of an earlier one, but says something else. It "
            "was not run; look for the bug upstream.",
            names,
        )
        _tell(signals.conflicting_duplicate, **names)
    if earlier.state == State.DEAD:
        logger.error(
            "Message %(message_id)s for %(handler)s has the biz-id %(biz_id)s of a dead letter, and was not run. Retry or skip "
            "that one to decide about both.",
            names,
        )
    _tell(signals.duplicate_suppressed, **names)


def _handled(handler: Handler, message: Message) -> Received:
    logger.debug("%s: handled message %s (biz-id %s).", handler.name, message.id, message.biz_id)
    _tell(signals.message_handled, message=message, handler=handler.name)
    return Received.HANDLED


def _after_commit(handler: Handler, announce: Callable[[], object]) -> None:
    transaction.on_commit(announce, using=handler.using, robust=True)


def _tell(signal: Signal, **arguments: Any) -> None:
    try:
        signal.send_robust(sender=InboxMessage, **arguments)
    except BaseException:
        # send_robust lets SystemExit through, and the state is committed.
        logger.exception("A receiver of an inbox signal tried to end the process.")


# ------------------------------------------------------------------------------------------------------------------- reading


def _identify(handler: Handler, message: Message) -> str:
    if message.topic != handler.topic:
        raise Undecodable(f"It says its topic is {message.topic!r}, but this queue is for {handler.topic!r}.")
    try:
        biz_id = handler.identify(message)
    except BaseException as error:  # the user's code, see _receive_fresh
        raise Undecodable(f"biz_id of {handler.name} failed with {type(error).__name__}: {describe(error)}") from error
    return biz_id if not biz_id.startswith(UNIDENTIFIED) else "own:" + biz_id


def _identify_late(handler: Handler, message: Message, stored: InboxMessage) -> str:
    """The biz-id it was stored under; when it had none, and an operator retries it, what can be found now."""
    if not stored.biz_id.startswith(UNIDENTIFIED):
        return stored.biz_id
    return _identify(handler, message) if handler.biz_id else stored.biz_id


def _outside_window(envelope: Envelope, options: InboxOptions) -> str:
    """Why this delivery is too old (or too new) to be told from a duplicate, or "". The age fence.

    Rows are purged after RETENTION; a copy that comes later would have its effect again. The margin is far larger than any
    skew of the two clocks.
    """
    if envelope.created_at is None:
        return ""
    since = max(envelope.created_at, envelope.deliver_at or envelope.created_at)
    age = utcnow() - since
    if age > options.oldest_run:
        return (
            f"It is {age.days} days old, past the deduplication window of {options.oldest_run.days} days: whether it has been "
            "handled before can no longer be known. Retry it if you know that it has not."
        )
    if -age > options.AGE_FENCE_MARGIN:
        return f"It claims to come from the future ({since.isoformat()}), which would escape the deduplication window."
    return ""


def _message(
    envelope: Envelope, options: InboxOptions, *, needs_id: bool = True, attempt: int = 1, biz_id: str = ""
) -> Message:
    """The message a handler gets.

    Raises:
        Undecodable: it has no identity, or its body cannot be read.
    """
    if needs_id and not envelope.dedup_id:
        raise Undecodable("It has no identity: neither a CloudEvents id, nor a bizid, nor an AMQP message_id that can be read.")
    kind = media_type(envelope.content_type)
    if kind not in options.ACCEPT and not kind.endswith("+json"):
        raise Undecodable(
            f"Its content type {envelope.content_type!r} is not accepted; INBOX['ACCEPT'] is {list(options.ACCEPT)}."
        )
    return Message(
        id=envelope.id,
        topic=envelope.topic,
        key=envelope.key,
        biz_id=biz_id or envelope.dedup_id,
        payload=decode_payload(envelope.body, envelope.content_type),
        headers=dict(envelope.headers),
        created_at=envelope.created_at,
        attempt=attempt,
        redelivered=attempt > 1,
        correlation_id=envelope.correlation_id,
        causation_id=envelope.causation_id,
    )


def _row(handler: Handler, envelope: Envelope, *, biz_id: str, digest: str) -> NewRow:
    return NewRow(
        handler=handler.name,
        topic=handler.topic,
        biz_id=biz_id,
        message_id=envelope.id,
        key=envelope.key,
        content_type=envelope.content_type,
        body=envelope.body,
        digest=digest,
        headers=json.dumps(dict(envelope.headers)),
        source=envelope.source,
        correlation_id=envelope.correlation_id,
        causation_id=envelope.causation_id,
        traceparent=envelope.traceparent,
        created_at=envelope.created_at,
    )


def _stored_envelope(stored: InboxMessage) -> Envelope:
    return Envelope(
        id=stored.message_id,
        topic=stored.topic,
        source=stored.source,
        created_at=stored.created_at,
        biz_id=stored.biz_id,
        key=stored.key,
        correlation_id=stored.correlation_id,
        causation_id=stored.causation_id,
        traceparent=stored.traceparent,
        content_type=stored.content_type,
        body=bytes(stored.body),
        headers=stored.headers,
    )

"""Messages, each from its beginning to its outcome: deliveries, and stored messages whose attempt has been claimed.

*Fast path*, for fresh deliveries: one `run`, which inserts their rows in the handler's transaction.

*Careful path*, for a delivery that the broker has made before: store it first, so that the attempt is counted in its own commit
before the handler runs; a message that kills its process then runs out of attempts. Failed messages are also stored and
acknowledged: their retries are visible in the database.

*Stored messages* are retries, messages that were handed over, and those of the careful path. Each is claimed and read, and then
run as a fresh delivery is.

A run is one transaction for one message or many: begin, call, prove and commit, then settle. Fresh deliveries begin with the
INSERT of their rows, by one statement, and the guard names those that are new. A stored message begins with the lock of its
row. Then the handler is called, and the commit sentinel proves that the transaction is still the one that began. After the
commit the outcome is settled. A `Policy` decides how.

Many messages are a batch that its handler takes at once, or single calls that share a commit: group commit in databases (DeWitt
et al. 1984), to save round trips instead of disk writes. Any error rolls all of them back. Then the caller runs smaller parts,
down to single messages, so that a poisoned message fails alone.

Under a *lease* the handler runs outside any transaction, see `leased`.

Every delivery ends as one of `Outcome`. Only DEFERRED and UNSTORED are not acknowledged, and are processed again.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

from django.db import DatabaseError, InterfaceError, connections

from exactly_once.process.logs import escaping_logger
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.sql.prepared_statements import Rows, may_begin
from exactly_once.wire.text import describe
from inbox import metrics, signals
from inbox.conf import InboxOptions
from inbox.errors import RetryLater, TransactionEnded
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.leases.stores import Lease, lease_store
from inbox.models import InboxMessage
from inbox.receiving.admit import admit
from inbox.receiving.in_hand import in_hand, is_quarantined, lost_sessions, quarantine
from inbox.receiving.leased import run_leased
from inbox.receiving.outages import make_refunds, record_loss, refund_later
from inbox.receiving.outcomes import defer_locked, duplicate, fail_stored, failure_of, send, store_failure
from inbox.receiving.parking import open_claimed, open_first
from inbox.receiving.reading import Unidentifiable, is_parked, message_for, stored_arrival
from inbox.states import Outcome
from inbox.store import arrivals as fresh
from inbox.store import claims, counting
from inbox.store.dialect import is_reachable
from inbox.store.message_rows import ConcurrentDuplicate, Failure, Guard, KeyBusy, Next, Successor
from inbox.store.sentinel import roll_back_run
from inbox.transactions.arrival import Arrival
from inbox.transactions.running import (
    DatabaseUnavailable,
    Failed,
    call,
    committed,
    in_transaction,
    read_committed,
    run_with_reruns,
    statements_of_ours,
)
from inbox.transactions.sessions import SessionChanges

logger = escaping_logger(__name__)

_UNAVAILABLE_BACKOFF = timedelta(seconds=5)
_KEY_BUSY_BACKOFF = timedelta(seconds=0.5)


class Queue(Protocol):
    """The deliveries behind the single one that is received."""

    def take(self) -> Arrival | None:
        """The next one, if it can be run as this one is."""

    def advance(self, outcome: Outcome = Outcome.HANDLED) -> None:
        """This one has ended; answer it. The one that was taken takes its place."""


def receive(
    handler: Handler,
    arrivals: list[Arrival],
    options: InboxOptions,
    *,
    acknowledge: Callable[[], object] | None = None,
    queue: Queue | None = None,
) -> list[Outcome] | None:
    """Process deliveries to their outcomes; returns them in their order.

    None: several have failed together, without any effect, and are to be run in smaller parts.

    Args:
        arrivals: one that is refused, unread, redelivered or leased is given alone.
        acknowledge: called if the delivery may be acknowledged before the handler runs: under a lease in the database, its row
            and body are committed, and the run may take longer than the broker waits for an acknowledgement.
        queue: more deliveries, which may be run after a single one, too. The outcome that is returned is that of the last.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided.
    """
    first = arrivals[0]
    if first.refused or not handler.kind.is_called:
        return admit(handler, arrivals, options)
    held = None
    try:
        if handler.lease and not (first.unread and is_parked(first.row.biz_id)):
            return [_receive_leased(first, options, acknowledge, queue)]
        rows = [arrival.row for arrival in arrivals]
        if (held := in_hand.take(rows)) is not None:
            is_suspect = lost_sessions.counts and lost_sessions.are_among(rows)
            if is_suspect and len(rows) > 1:
                return None
            if is_suspect or first.unread or first.row.redelivered:
                return [_receive_carefully(handler, first, options)]
            chain = None if queue is None else partial(_Deliveries, queue=queue, advance=queue.advance)
            return run(Policy(handler, options), arrivals, chain)
    except ConcurrentDuplicate:
        in_hand.remember_elsewhere(arrivals[0].row, options.DUPLICATE_TIMEOUT)
    finally:
        if held:
            in_hand.end(held)
    return [Outcome.DEFERRED] if len(arrivals) == 1 else None


def _receive_carefully(handler: Handler, arrival: Arrival, options: InboxOptions) -> Outcome:
    (became,) = admit(handler, [arrival], options)
    if became is not Outcome.STORED:
        return became
    claimed = claim_next([handler], handler.using, options)
    return run_stored(*claimed, options) if claimed else became


def _receive_leased(
    arrival: Arrival, options: InboxOptions, acknowledge: Callable[[], object] | None, queue: Queue | None
) -> Outcome:
    """Process one delivery under a lease to its outcome.

    If its lease is in the database, its row and body are stored there, so it is acknowledged before the run. With Redis, the
    broker has the only copy until the run has ended.

    Raises:
        DatabaseUnavailable, LeaseStoreUnavailable: the database or the lease store does not answer; the message was not run.
        ConcurrentDuplicate: another transaction is inserting its row.
    """
    drop_unusable_connections()
    lease = lease_store(options).acquire(arrival)
    if not isinstance(lease, Lease):
        return lease or admit(arrival.handler, [arrival], options)[0]
    if acknowledge is None or lease.pk is None:
        return run_leased(lease, options, handled)
    while True:
        acknowledge()
        outcome = Outcome.STORED
        try:
            # While a receiver of the signal runs, nothing would extend the lease of the next one.
            take = None if queue is None or signals.message_handled.receivers else queue.take
            outcome = run_leased(lease, options, handled, take)
        except DatabaseUnavailable as outage:
            # The broker does not deliver it again.
            logger.warning("%s: its outcome could not be stored; it runs again when its lease has ended: %s", lease, outage)
        except Exception:
            logger.exception("%s: unexpected error; it runs again when its lease has ended.", lease)
        if queue is None or lease.following is None:
            return outcome
        queue.advance(outcome)
        lease = lease.following


def claim_next(handlers: Sequence[Handler], alias: str, options: InboxOptions) -> tuple[Handler, InboxMessage] | None:
    """Claim one stored message that is due on `alias` and count its attempt; None if there is none.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    known = {handler.name: handler for handler in handlers if handler.using == alias}
    stored: InboxMessage | None = None
    quarantined = quarantine.take(options.REDELIVERY_AFTER)
    try:
        stored = committed(alias, claims.claim_due, list(known), options.REDELIVERY_AFTER, quarantined=quarantined)
    finally:
        if stored is None or not is_quarantined(stored):
            quarantine.leave()
    return (known[stored.handler], stored) if stored else None


def run_stored(handler: Handler, stored: InboxMessage, options: InboxOptions, successor: Successor | None = None) -> Outcome:
    """Run a stored message whose attempt has been claimed; the outcome of that, or of the last one that began with a commit.

    If it is handled, `successor` has claimed the next message.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    successor, alias = successor or Successor(), handler.using
    successor.running, successor.message = stored, None
    try:
        outcome = _run_claimed(handler, stored, options, successor)
    except KeyBusy:
        committed(alias, claims.give_back, successor.running, _KEY_BUSY_BACKOFF)
        return Outcome.STORED
    except ConcurrentDuplicate:
        return defer_locked(handler, successor.running)
    finally:
        quarantine.leave()
        if successor.unknown:
            refund_later(alias, claims.give_back_of, successor.unknown, handler.name, successor.claimed_for)
    if outcome is Outcome.HANDLED:
        counting.time_stored_effect(alias, handler.name, successor.running.received_at)
    return outcome


def _run_claimed(handler: Handler, stored: InboxMessage, options: InboxOptions, successor: Successor) -> Outcome:
    lease: Lease | Outcome | None = None
    try:
        arrival = open_claimed(handler, stored, options)
        if handler.lease and isinstance(arrival, Arrival):
            lease = lease_store(options).acquire(arrival)
    except Unidentifiable as error:
        failed = failure_of(stored_arrival(handler, stored), error.__cause__ or error, stored.attempts, options)
        return fail_stored(handler, stored, failed)
    except DatabaseUnavailable as outage:
        if outage.refused or not is_reachable(handler.using):
            refund_later(handler.using, claims.give_back, stored, _UNAVAILABLE_BACKOFF)
            raise
        # It is the lease store, or the database that the handler's `biz_id` queries, and other messages must not wait.
        committed(handler.using, claims.give_back, stored, _UNAVAILABLE_BACKOFF)
        logger.warning("%s: message %s is deferred: %s", handler.name, stored.message_id, outage)
        return Outcome.STORED
    if isinstance(arrival, Outcome):
        return arrival
    with in_hand.running(stored) as hold:
        if not handler.lease:
            chain = partial(_Successors, successor=successor, advance=partial(_advance, handler, successor, hold))
            return (run(Policy(handler, options), [arrival], chain) or [Outcome.STORED])[0]
        return run_leased(lease, options, handled) if isinstance(lease, Lease) else lease or Outcome.DUPLICATE


def handled(handler: Handler, messages: Sequence[Message]) -> None:
    counting.tallies[handler.using].count(handler.name, "handled", len(messages))
    if metrics.HANDLED.is_attached:
        metrics.HANDLED.add(len(messages), handler.name)
    for message in messages:
        logger.debug("%s: handled message %s (biz-id %s).", handler.name, message.id, message.biz_id)
        if signals.message_handled.receivers:
            names = {"topic": message.topic, "message_id": message.id, "biz_id": message.biz_id}
            send(signals.message_handled, handler=handler.name, **names)


class Policy:
    """What differs between kinds of work. This is the policy of messages: a failure is stored, and a runner retries it.

    A delivery may be acknowledged when the policy's method has returned an `Outcome`, except DEFERRED.

    Attributes:
        attempt: the number of a fresh delivery's attempt. The first one is run once more if its session is lost.
        durable: the transaction must not be a savepoint of the caller's.
        default_result: the JSON that a fresh row is inserted with as its handler's result.
        encode_result: returns the JSON that is stored with the row as the handler's result; None: no result is stored.
    """

    attempt = 1
    durable = True
    default_result: str | None = None
    encode_result: Callable[[object], str | None] | None = None

    def __init__(self, handler: Handler, options: InboxOptions) -> None:
        self.handler, self.options = handler, options

    def message_for_run(self, arrival: Arrival) -> Message:
        """The handler's argument for one run: a new object for each, because a handler may change its payload."""
        message, arrival.message = arrival.message, None
        return message or message_for(arrival, self.options)

    def settle_success(self, messages: Sequence[Message]) -> None:
        handled(self.handler, messages)

    def failure(self, arrival: Arrival, stored: InboxMessage, error: BaseException) -> Failure | None:
        """The failure of a stored message, to be stored in its transaction. None: `settle_failure` decides after that."""
        return failure_of(arrival, error, stored.attempts, self.options, row=stored.pk)

    def settle_failure(self, arrival: Arrival, error: BaseException) -> Outcome:
        handler, options, stored = self.handler, self.options, arrival.stored
        if stored is None:
            return store_failure(handler, arrival.row, failure_of(arrival, error, self.attempt, options), options)
        return fail_stored(handler, stored, failure_of(arrival, error, stored.attempts, options, row=stored.pk))

    def settle_duplicate(self, arrival: Arrival) -> Outcome:
        """It was not run: a row of this name exists, or the claim of a stored message has ended."""
        return Outcome.DUPLICATE if arrival.stored is not None else duplicate(self.handler, arrival.row)


@dataclass(kw_only=True, eq=False)
class Chain:
    """Messages of a handler, each begun by the round trip that commits the one before it. `arrivals` has the current one.

    Attributes:
        ran: the argument of the current one; empty if it is not to be run.
        advance: called when the current one has had its effect, and the next one takes its place.
        next: the one after it, if that can be run here.
    """

    policy: Policy
    arrivals: list[Arrival]
    ran: dict[int, Message]
    advance: Callable[[], object]
    next: Arrival | None = None

    def take(self, guard: Guard, changes: SessionChanges) -> Next | None:
        raise NotImplementedError

    def is_alone(self, guard: Guard, changes: SessionChanges) -> bool:
        """What a hook, or a receiver of the signal, does after the commit must not be part of the next transaction."""
        connection = guard.connection
        has_hooks = len(connection.run_on_commit) > 1 or bool(signals.message_handled.receivers)
        return not (changes.names or has_hooks) and may_begin(connection)

    def begin(self, answer: Callable[[], Rows]) -> Guard | None:
        connection: Any = connections[self.policy.handler.using]
        arrival = self.next
        connection.rollback_exc = None  # of the current one
        if arrival is None:
            with suppress(DatabaseError, InterfaceError):
                answer()
            return None
        try:
            self.policy.settle_success([*self.ran.values()])
            self.ran.clear()
            self.advance()
            self.arrivals[0] = arrival
        finally:
            with statements_of_ours:
                stored, row = arrival.stored, arrival.row
                guard = fresh.begun(connection, row, answer) if stored is None else claims.begun(connection, stored, answer)
        if guard is not None:
            self.ran[0] = self.policy.message_for_run(arrival)
        return guard


@dataclass(kw_only=True, eq=False)
class _Deliveries(Chain):
    """Fresh ones."""

    queue: Queue

    def take(self, guard: Guard, changes: SessionChanges) -> Next | None:
        if not self.is_alone(guard, changes) or (arrival := self.queue.take()) is None:
            return None
        self.next, policy = arrival, self.policy
        return Next(fresh.first_statement(arrival.row, policy.options.DUPLICATE_TIMEOUT, policy.handler.limits))


@dataclass(kw_only=True, eq=False)
class _Successors(Chain):
    """Stored ones, each claimed in the transaction that settles the one before it."""

    successor: Successor

    def take(self, guard: Guard, changes: SessionChanges) -> Next | None:
        policy, successor = self.policy, self.successor
        if not guard.claims or (in_turn := successor.in_turn()) is None:
            return None
        is_first = guard.claimed is not None and guard.claimed.attempts == 1  # a retry has other reruns
        begins = successor.begins and is_first and not (policy.handler.kind.collects_for or policy.handler.payloads)
        first = None
        if begins and self.is_alone(guard, changes):
            longest_wait, is_ordered = policy.options.DUPLICATE_TIMEOUT, policy.handler.ordered is not None
            first = claims.first_statement(longest_wait, policy.handler.limits, is_ordered=is_ordered)
        return Next(first, successor, in_turn)

    def begin(self, answer: Callable[[], Rows]) -> Guard | None:
        claimed, policy = self.successor.message, self.policy
        self.next = None if claimed is None else open_first(policy.handler, claimed, policy.options)
        return super().begin(answer)


def _advance(handler: Handler, successor: Successor, hold: Callable[[InboxMessage], object]) -> None:
    before, claimed = successor.running, successor.message
    if before is not None and claimed is not None:
        counting.time_stored_effect(handler.using, handler.name, before.received_at)
        hold(claimed)
        successor.running, successor.message = claimed, None
        successor.handled += 1


def run(
    policy: Policy,
    arrivals: list[Arrival],
    chain: Callable[..., Chain] | None = None,
) -> list[Outcome] | None:
    """Run fresh deliveries, or one stored message whose attempt was claimed, in one transaction; returns the outcome of each.

    None: several have failed together, without any effect, and are to be run in smaller parts.

    Args:
        chain: runs more messages behind a single one. The one that is run now is always the first of `arrivals`.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided. If the attempt of a stored message was not made,
            it is to be refunded.
        ConcurrentDuplicate: another transaction is handling the single message, or has locked its row.
        KeyBusy: another message of its key is being run.
    """
    handler, single = policy.handler, len(arrivals) == 1
    stored, ran, calling = arrivals[0].stored, dict[int, Message](), list[bool]()
    attempt = policy.attempt if stored is None else stored.attempts
    begin, call_all = partial(_begin, policy, arrivals, ran), partial(_call_all, policy, arrivals, ran, calling)
    fail = None if stored is None else partial(_fail, policy, arrivals)
    # Only the first time, so that each message has its own reruns.
    chains = [] if chain is None else [chain(policy=policy, arrivals=arrivals, ran=ran)]

    def once() -> None:
        following = chains.pop() if chains else None
        of = partial(_names, arrivals)
        in_transaction(handler, begin, call_all, of=of, durable=policy.durable, fail=fail, following=following)

    try:
        # A handler that loses its session at every run is rerun once in the first attempt, never in later ones.
        run_with_reruns(handler.using, once, reruns=single and policy.attempt == attempt == 1)
    except DatabaseUnavailable as outage:
        _interrupted(handler, arrivals, outage, was_called=bool(calling))
        raise
    except (ConcurrentDuplicate, KeyBusy):
        if single:
            raise
        return None
    except Failed as failed:
        return [fail_stored(handler, cast("InboxMessage", arrivals[0].stored), failed.failure)]
    # No signal arrives where handlers run, so even KeyboardInterrupt comes from the handler.
    except BaseException as error:  # noqa: BLE001
        return _settle_failed(policy, arrivals, ran, error)
    if ran:
        policy.settle_success([*ran.values()])
    if single:
        return [Outcome.HANDLED if ran else policy.settle_duplicate(arrivals[0])]
    return [Outcome.HANDLED if index in ran else _duplicate(policy, arrival) for index, arrival in enumerate(arrivals)]


def _interrupted(handler: Handler, arrivals: Sequence[Arrival], outage: DatabaseUnavailable, *, was_called: bool) -> None:
    """Refund the attempt of a stored message, unless its session is lost in each of them."""
    if was_called:
        record_loss(handler, [arrival.row for arrival in arrivals], outage)
    stored = arrivals[0].stored
    if stored is not None and not lost_sessions.count_against(stored):
        refund_later(handler.using, claims.give_back, stored)
        if outage.beside:  # its own database is available
            make_refunds(handler.using)


def _names(arrivals: Sequence[Arrival]) -> str:
    return arrivals[0].row.message_id if len(arrivals) == 1 else f"{len(arrivals)} messages"


def _fail(policy: Policy, arrivals: Sequence[Arrival], guard: Guard, error: BaseException) -> Failure | None:
    """Store the failure of a stored message in its transaction. None: it could not be stored there."""
    if guard.claimed is None:
        return None
    if isinstance(error, RetryLater):
        with suppress(DatabaseError, InterfaceError):
            roll_back_run(guard)  # the age of the message is read
    failure = policy.failure(arrivals[0], guard.claimed, error)
    is_stored = failure is not None and claims.fail_run(guard, failure, leaves=arrivals[0].leaves(failure))
    return replace(failure, is_stored=True) if failure and is_stored else None


def _begin(policy: Policy, arrivals: Sequence[Arrival], ran: dict[int, Message]) -> Guard | None:
    """The first statement of the transaction; fills `ran` with the arguments of the handler. None: there is nothing to run."""
    alias, first, longest_wait = policy.handler.using, arrivals[0], policy.options.DUPLICATE_TIMEOUT
    limits = policy.handler.limits
    ran.clear()
    if policy.handler.kind.collects_for:
        read_committed(alias)
    if first.stored is not None:
        is_ordered = policy.handler.ordered is not None
        guard = claims.begin_stored(alias, first.stored, is_ordered=is_ordered, longest_wait=longest_wait, limits=limits)
    else:
        rows = [arrival.row for arrival in arrivals]
        result = policy.default_result
        guard = fresh.begin_fresh(alias, rows, longest_wait, attempt=policy.attempt, result=result, limits=limits)
    for index in guard.begun if guard is not None else ():
        ran[index] = policy.message_for_run(arrivals[index])
    return guard


def _settle_failed(
    policy: Policy, arrivals: Sequence[Arrival], ran: Collection[int], error: BaseException
) -> list[Outcome] | None:
    if len(arrivals) == 1:
        return [policy.settle_failure(arrivals[0], error)]
    if isinstance(error, TransactionEnded) and error.is_stored:
        return [
            policy.settle_failure(arrival, error) if index in ran else policy.settle_duplicate(arrival)
            for index, arrival in enumerate(arrivals)
        ]
    logger.info(
        "%s: %d messages in one transaction were rolled back and are run in smaller parts: %s",
        policy.handler.name,
        len(arrivals),
        describe(error),
    )
    return None


def _call_all(policy: Policy, arrivals: Sequence[Arrival], ran: Mapping[int, Message], calling: list[bool]) -> str | None:
    """One call with all messages, or one for each. `calling` is not empty meanwhile."""
    handler, given = policy.handler, [(message, arrivals[index].envelope) for index, message in ran.items()]
    calling[:] = [True]
    if len(given) == 1 or handler.kind.gets_list:
        returned = call(handler, given)
        calling.clear()
        return policy.encode_result(returned) if policy.encode_result else None
    for one in given:
        call(handler, [one])
    calling.clear()
    # Single calls would each have their own commit: a hook that raises must not stop the others' hooks.
    connection: Any = connections[handler.using]
    connection.run_on_commit = [
        (savepoints, partial(_run_hook, handler, hook), False) for savepoints, hook, _ in connection.run_on_commit
    ]
    return None


def _run_hook(handler: Handler, hook: Callable[[], object]) -> None:
    try:
        hook()
    except Exception:
        logger.exception("An on_commit hook of %s failed after its effect was committed.", handler.name)


def _duplicate(policy: Policy, arrival: Arrival) -> Outcome:
    try:
        return policy.settle_duplicate(arrival)
    except DatabaseUnavailable:
        # The others are committed; running all of them again would count them as duplicates.
        return Outcome.DEFERRED

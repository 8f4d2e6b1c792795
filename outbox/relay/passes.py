"""One pass of the relay: claim, send, settle.

A pass is one short transaction. Its shard locks die with the connection that holds them, so a relay that is killed frees its
shards at once and a relay that overslept settles nothing. The broker is asked to confirm every message before its row is
settled; a crash in between sends some messages again, never none. Where the database has one writer, a lease takes the place
of the locks and the pass is three short transactions instead.

This module knows neither SQL (`store`) nor any broker (`transports`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from django.db import OperationalError, transaction
from django.dispatch import Signal

from outbox import signals, store
from outbox.conf import OutboxOptions
from outbox.kernel.clock import monotonic
from outbox.kernel.envelope import REPLAY_HEADER, Envelope
from outbox.kernel.faults import is_collision
from outbox.kernel.transport import Outcome, Parcel, Transport, Verdict
from outbox.relay.breaker import Breakers
from outbox.relay.waves import waves
from outbox.store import Busy, Failure, RelayedMessage, Settlement

logger = logging.getLogger(__name__)

_MARGIN = timedelta(seconds=2)
"""What the database grants a pass beyond its deadline, for settling."""
_MOST_WAVES = 100
"""So that one hot key does not keep the other keys of its shard waiting for long; its next messages go with the next pass."""
_TOPICS_FAULT = (Outcome.NACKED, Outcome.RETURNED)


@dataclass(frozen=True, kw_only=True)
class PassReport:
    """What one pass did.

    Attributes:
        claimed: rows in hand; 0 means there was nothing to do.
        refused: shards that somebody else was working on.
        settled: rows whose outcome is written down.
        published: of these, confirmed.
        broken: why the broker connection is gone, or None.
        suspicious: send fewer next time.
        overdue: reading the rows has taken so long that none was sent.
        waits_for: who holds the lease that this relay would need, or "".
        highest: the highest position in hand.
    """

    claimed: int = 0
    refused: int = 0
    settled: int = 0
    published: int = 0
    broken: str | None = None
    suspicious: bool = False
    overdue: bool = False
    waits_for: str = ""
    highest: int = 0


@dataclass
class _Batch:
    """What the broker has said so far of the rows in hand."""

    rows: Sequence[RelayedMessage]
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    put_off: dict[str, list[int]] = field(default_factory=dict)
    broken: str | None = None
    suspicious: bool = False
    overdue: bool = False


class Pass:
    """Runs passes over one database and one connected transport."""

    def __init__(self, alias: str, transport: Transport, options: OutboxOptions) -> None:
        self._alias = alias
        self._transport = transport
        self._options = options
        self.breakers = Breakers()
        # Handing over inside the pass's own transaction needs no lease: the writer's lock of SQLite covers it.
        self._in_one_transaction = store.claims_by_locks(alias) or transport.capabilities.transactional
        self._lease = store.Lease(alias, 3 * options.BATCH_DEADLINE)

    def run(self, busy: Sequence[Busy], limit: int) -> PassReport:
        """Carry up to `limit` ready messages of those of the `busy` shards that are free.

        Raises:
            django.db.Error: the database failed; nothing is settled, everything in hand stays ready.
        """
        return (self._run_in_one_transaction if self._in_one_transaction else self._run_by_lease)(busy, limit)

    def close(self) -> None:
        """Give up the right to relay, so that another takes over at once."""
        if not self._in_one_transaction:
            self._lease.release()

    def _run_in_one_transaction(self, busy: Sequence[Busy], limit: int) -> PassReport:
        with transaction.atomic(using=self._alias, durable=True):
            store.bound_transaction(self._alias, self._options.BATCH_DEADLINE + _MARGIN)
            begun_at = monotonic()
            claim = store.claim_ready(self._alias, busy, limit)
            batch = self._send(claim.rows, begun_at)
            settlement = self._decide(batch)
            settled = self._settle(settlement)
        return self._report(batch, settlement, settled, refused=len(claim.refused))

    def _settle(self, settlement: Settlement) -> int:
        try:
            with transaction.atomic(using=self._alias):
                return store.settle(self._alias, settlement)
        except OperationalError as error:
            if not is_collision(error):
                raise
            # Somebody has one of these rows locked. It alone stays ready, or all of them would be sent again and again.
            return store.settle(self._alias, settlement, pass_over_locked=True)

    def _run_by_lease(self, busy: Sequence[Busy], limit: int) -> PassReport:
        begun_at = monotonic()
        rows = self._lease.claim(busy, limit)
        if rows is None:
            return PassReport(waits_for=self._lease.holder())
        if not rows:
            return PassReport()
        batch = self._send(rows, begun_at)
        settlement = self._decide(batch)
        try:
            settled = self._lease.settle(settlement)
        except store.LeaseLost:
            logger.warning("This relay overslept its lease and settled nothing; the %d messages are sent again.", len(rows))
            return PassReport(claimed=len(rows), broken=batch.broken)
        return self._report(batch, settlement, settled)

    def _send(self, rows: Sequence[RelayedMessage], begun_at: float) -> _Batch:
        # Counted from before the claim: a relay that was frozen after it must not wake up with its time still ahead.
        deadline = begun_at + self._options.BATCH_DEADLINE.total_seconds()
        batch = _Batch(rows, overdue=bool(rows) and monotonic() > deadline)
        stopped_keys: set[str] = set()
        for wave in waves(self._sendable(batch, stopped_keys))[:_MOST_WAVES]:
            if batch.broken is not None or monotonic() > deadline:
                break
            passed = monotonic() - begun_at
            sendable = [row for row in wave if row.key not in stopped_keys and not row.expires_within(passed)]
            sent = self._transport.send([self._parcel(row) for row in sendable], deadline)
            batch.verdicts.update(sent.verdicts)
            batch.broken, batch.suspicious = sent.broken, sent.suspicious
            stopped_keys.update(row.key for row in wave if row.key and not _is_confirmed(row, sent.verdicts))
        return batch

    def _sendable(self, batch: _Batch, stopped_keys: set[str]) -> Iterator[RelayedMessage]:
        """Those that may be sent. A message put off because of its topic stops its key, like one that failed."""
        self.breakers.begin()
        for row in batch.rows:
            if row.expired or row.held or row.key in stopped_keys:
                continue
            if self.breakers.admits(row.topic):
                yield row
                continue
            batch.put_off.setdefault(row.topic, []).append(row.position)
            if row.key:
                stopped_keys.add(row.key)

    def _parcel(self, row: RelayedMessage) -> Parcel:
        headers = dict(row.headers)
        replayed = headers.pop(REPLAY_HEADER, None) is not None
        return Parcel(
            position=row.position,
            priority=row.priority,
            wire=row.wire,
            lasting=row.lasting,
            envelope=Envelope(
                id=row.id,
                topic=row.topic,
                source=self._options.source,
                created_at=row.created_at,
                deliver_at=row.deliver_at,
                biz_id=row.biz_id,
                key=row.key,
                correlation_id=row.correlation_id,
                causation_id=row.causation_id,
                traceparent=row.traceparent,
                body=row.body,
                headers=headers,
                replayed=replayed,
            ),
        )

    def _decide(self, batch: _Batch) -> Settlement:
        """Turn the broker's words into transitions.

        An unknown outcome (deadline, closed channel) leaves its row ready: the message may be in the broker already, and a
        second copy is what the inbox is for. Losing it is what nothing is for.
        """
        published: list[int] = []
        failed: dict[tuple[Verdict, int], list[RelayedMessage]] = {}
        for row in batch.rows:
            verdict = batch.verdicts.get(row.position)
            if verdict is None or verdict.outcome is Outcome.UNKNOWN:
                continue
            if verdict.outcome is Outcome.CONFIRMED:
                published.append(row.position)
            else:
                failed.setdefault((verdict, row.attempts + 1), []).append(row)
        self.breakers.note(
            taken=[row.topic for row in batch.rows if _is_confirmed(row, batch.verdicts)],
            refused=[row.topic for (verdict, _), rows in failed.items() if verdict.outcome in _TOPICS_FAULT for row in rows],
        )
        return Settlement(
            published=published,
            expired=[row.position for row in batch.rows if row.expired],
            waiting=[row.position for row in batch.rows if row.held and not row.expired],
            failed=[
                *(self._failure(rows, attempt, verdict) for (verdict, attempt), rows in failed.items()),
                *(self._put_off(positions) for positions in batch.put_off.values()),
            ],
        )

    def _put_off(self, positions: Sequence[int]) -> Failure:
        return Failure(positions=positions, error=store.PUT_OFF, retry_after=self.breakers.rest(), tried=False, matters=False)

    def _failure(self, rows: Sequence[RelayedMessage], attempt: int, verdict: Verdict) -> Failure:
        if verdict.outcome is Outcome.RETURNED:
            # Its queue may come with the next deploy, so it is never given up.
            rest: timedelta | None = self._options.unroutable_retry.delay(attempt)
        elif self._options.retry.exhausted(attempt):
            rest = None
        else:
            rest = self._options.retry.delay(attempt)
        return Failure(
            positions=[row.position for row in rows],
            error=verdict.reason,
            retry_after=rest,
            # Of what is tried for ever the trail tells no more than of what is not.
            matters=attempt <= self._options.MAX_ATTEMPTS,
        )

    def _report(self, batch: _Batch, settlement: Settlement, settled: int, refused: int = 0) -> PassReport:
        self._announce(batch.rows, settlement)
        return PassReport(
            claimed=len(batch.rows),
            refused=refused,
            settled=settled,
            published=len(settlement.published),
            broken=batch.broken,
            suspicious=batch.suspicious,
            overdue=batch.overdue,
            highest=max((row.position for row in batch.rows), default=0),
        )

    @staticmethod
    def _announce(rows: Iterable[RelayedMessage], settlement: Settlement) -> None:
        heard = signals.message_published.has_listeners()
        if not (heard or settlement.failed or settlement.expired):
            return
        by_position = {row.position: row for row in rows}
        for failure, position in _tried(settlement):
            message = by_position[position]
            dead = failure.retry_after is None
            logger.log(
                logging.ERROR if dead else logging.WARNING,
                "Message %s (%s, biz-id %s) %s at attempt %d: %s.",
                message.message_id,
                message.topic,
                message.biz_id,
                "is dead" if dead else "was not published",
                message.attempts + 1,
                failure.error,
            )
            _tell(signals.message_dead if dead else signals.message_retrying, message, error=failure.error)
        for topic, count in Counter(by_position[position].topic for position in settlement.expired).items():
            logger.warning("%d messages of %s have expired before they could be published.", count, topic)
        for position in settlement.expired:
            _tell(signals.message_expired, by_position[position])
        if heard:
            for position in settlement.published:
                _tell(signals.message_published, by_position[position])


def _is_confirmed(row: RelayedMessage, verdicts: Mapping[int, Verdict]) -> bool:
    verdict = verdicts.get(row.position)
    return verdict is not None and verdict.outcome is Outcome.CONFIRMED


def _tried(settlement: Settlement) -> Iterator[tuple[Failure, int]]:
    return ((failure, position) for failure in settlement.failed if failure.tried for position in failure.positions)


def _tell(signal: Signal, message: RelayedMessage, **extra: object) -> None:
    try:
        signal.send_robust(sender=RelayedMessage, message=message, **extra)
    except BaseException:
        # send_robust lets SystemExit through, and the state is committed.
        logger.exception("A receiver of an outbox signal tried to end the process.")

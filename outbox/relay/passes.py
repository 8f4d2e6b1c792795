"""One pass of the relay: claim, send, settle.

A pass is one short transaction. Its shard locks die with the connection that holds them, so a relay that is killed frees its
shards at once and a relay that overslept settles nothing. The broker is asked to confirm every message before its row is
settled; a crash in between sends some messages again, never none. Where the database has one writer, a lease takes the place
of the locks and the pass is three short transactions instead.

This module knows neither SQL (`store`) nor any broker (`transports`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from django.db import transaction
from django.dispatch import Signal

from outbox import signals, store
from outbox.conf import OutboxOptions
from outbox.kernel.clock import monotonic
from outbox.kernel.envelope import Envelope
from outbox.kernel.transport import Outcome, Parcel, Transport, Verdict
from outbox.relay.waves import waves
from outbox.store import Failure, RelayedMessage, Settlement

logger = logging.getLogger(__name__)

_MARGIN = timedelta(seconds=2)
"""What the database grants a pass beyond its deadline, for settling."""


@dataclass(frozen=True, kw_only=True)
class PassReport:
    """What one pass did.

    Attributes:
        claimed: rows in hand; 0 means there was nothing to do.
        settled: rows whose outcome is written down.
        published: of these, confirmed.
        broken: why the broker connection is gone, or None.
        suspicious: send fewer next time.
        waits_for: who holds the lease that this relay would need, or "".
    """

    claimed: int = 0
    settled: int = 0
    published: int = 0
    broken: str | None = None
    suspicious: bool = False
    waits_for: str = ""


@dataclass
class _Batch:
    """What the broker has said so far of the rows in hand."""

    rows: Sequence[RelayedMessage]
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    broken: str | None = None
    suspicious: bool = False


class Pass:
    """Runs passes over one database and one connected transport."""

    def __init__(self, alias: str, transport: Transport, options: OutboxOptions) -> None:
        self._alias = alias
        self._transport = transport
        self._options = options
        # Handing over inside the pass's own transaction needs no lease: the writer's lock of SQLite covers it.
        self._in_one_transaction = store.claims_by_locks(alias) or transport.capabilities.transactional
        self._lease = store.Lease(alias, 3 * options.BATCH_DEADLINE)

    def run(self, limit: int) -> PassReport:
        """Carry up to `limit` ready messages.

        Raises:
            django.db.Error: the database failed; nothing is settled, everything in hand stays ready.
        """
        return self._run_in_one_transaction(limit) if self._in_one_transaction else self._run_by_lease(limit)

    def close(self) -> None:
        """Give up the right to relay, so that another takes over at once."""
        if not self._in_one_transaction:
            self._lease.release()

    def _run_in_one_transaction(self, limit: int) -> PassReport:
        with transaction.atomic(using=self._alias, durable=True):
            store.bound_transaction(self._alias, self._options.BATCH_DEADLINE + _MARGIN)
            deadline = self._deadline()
            batch = self._send(store.claim_ready(self._alias, limit), deadline)
            settlement = self._decide(batch)
            settled = store.settle(self._alias, settlement)
        return self._report(batch, settlement, settled)

    def _run_by_lease(self, limit: int) -> PassReport:
        deadline = self._deadline()
        rows = self._lease.claim(limit)
        if rows is None:
            return PassReport(waits_for=self._lease.holder())
        if not rows:
            return PassReport()
        batch = self._send(rows, deadline)
        settlement = self._decide(batch)
        try:
            settled = self._lease.settle(settlement)
        except store.LeaseLost:
            logger.warning("This relay overslept its lease and settled nothing; the %d messages are sent again.", len(rows))
            return PassReport(claimed=len(rows), broken=batch.broken)
        return self._report(batch, settlement, settled)

    def _deadline(self) -> float:
        # Taken before the claim: a relay that was frozen after it must not wake up with its time still ahead.
        return monotonic() + self._options.BATCH_DEADLINE.total_seconds()

    def _send(self, rows: Sequence[RelayedMessage], deadline: float) -> _Batch:
        batch = _Batch(rows)
        failed_keys: set[str] = set()
        for wave in waves(row for row in rows if not row.expired):
            if batch.broken is not None or monotonic() > deadline:
                break
            sendable = [row for row in wave if row.key not in failed_keys]
            sent = self._transport.send([self._parcel(row) for row in sendable], deadline)
            batch.verdicts.update(sent.verdicts)
            batch.broken, batch.suspicious = sent.broken, sent.suspicious
            failed_keys.update(row.key for row in sendable if row.key and not _is_confirmed(row, sent.verdicts))
        return batch

    def _parcel(self, row: RelayedMessage) -> Parcel:
        return Parcel(
            position=row.position,
            priority=row.priority,
            envelope=Envelope(
                id=str(row.message_id),
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
                headers=row.headers,
            ),
        )

    def _decide(self, batch: _Batch) -> Settlement:
        """Turn the broker's words into transitions.

        An unknown outcome (deadline, closed channel) leaves its row ready: the message may be in the broker already, and a
        second copy is what the inbox is for. Losing it is what nothing is for.
        """
        published: list[int] = []
        failed: list[Failure] = []
        for row in batch.rows:
            verdict = batch.verdicts.get(row.position)
            if verdict is None or verdict.outcome is Outcome.UNKNOWN:
                continue
            if verdict.outcome is Outcome.CONFIRMED:
                published.append(row.position)
            else:
                failed.append(self._failure(row, verdict))
        expired = [row.position for row in batch.rows if row.expired]
        return Settlement(published=published, expired=expired, failed=failed)

    def _failure(self, row: RelayedMessage, verdict: Verdict) -> Failure:
        attempt = row.attempts + 1
        if verdict.outcome is Outcome.RETURNED:
            # Its queue may come with the next deploy, so it is never given up.
            rest: timedelta | None = self._options.unroutable_retry.delay(attempt)
        elif self._options.retry.exhausted(attempt):
            rest = None
        else:
            rest = self._options.retry.delay(attempt)
        return Failure(position=row.position, error=verdict.reason, retry_after=rest)

    def _report(self, batch: _Batch, settlement: Settlement, settled: int) -> PassReport:
        self._announce(batch.rows, settlement)
        return PassReport(
            claimed=len(batch.rows),
            settled=settled,
            published=len(settlement.published),
            broken=batch.broken,
            suspicious=batch.suspicious,
        )

    @staticmethod
    def _announce(rows: Iterable[RelayedMessage], settlement: Settlement) -> None:
        by_position = {row.position: row for row in rows}
        for failure in settlement.failed:
            message = by_position[failure.position]
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
        for position in settlement.expired:
            _tell(signals.message_expired, by_position[position])
        if signals.message_published.has_listeners():
            for position in settlement.published:
                _tell(signals.message_published, by_position[position])


def _is_confirmed(row: RelayedMessage, verdicts: Mapping[int, Verdict]) -> bool:
    verdict = verdicts.get(row.position)
    return verdict is not None and verdict.outcome is Outcome.CONFIRMED


def _tell(signal: Signal, message: RelayedMessage, **extra: object) -> None:
    try:
        signal.send_robust(sender=RelayedMessage, message=message, **extra)
    except BaseException:
        # send_robust lets SystemExit through, and the state is committed.
        logger.exception("A receiver of an outbox signal tried to end the process.")

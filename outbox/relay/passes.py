"""One pass of the relay: claim, send, settle.

A pass is one short transaction. The database releases its shard locks when the connection ends, so a killed relay frees its
shards at once, and a relay that was frozen past its deadline settles nothing. A row is settled only after the broker has
confirmed the message; a crash in between sends it again and never loses it.

This module contains no SQL (see `store`) and knows no broker (see `transports`).
"""

import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain

from django.db import transaction
from django.dispatch import Signal

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.telemetry import tracing
from exactly_once.telemetry.statistics import Tally
from exactly_once.transport import broker
from exactly_once.transport.interface import (
    CONFIRMED,
    BrokerUnavailable,
    OutgoingMessage,
    PublishOutcome,
    Sent,
    Transport,
    Verdict,
)
from exactly_once.wire.retry import RetryPolicy
from outbox import signals
from outbox.conf import OutboxOptions
from outbox.models import OutboxMessage
from outbox.relay.breaker import PausedTopics
from outbox.relay.contention import Contention
from outbox.relay.counting import count_pass
from outbox.store import claiming, settling
from outbox.store.claiming import Bounds
from outbox.store.looking import BusyShard
from outbox.store.messages import DamagedRow, RelayedMessage, in_order, outgoing, waves
from outbox.store.set_aside import Reason, SetAside
from outbox.store.settling import Failure, Settlement
from outbox.store.unwritable_rows import Changed, UnwritableRows

logger = escaping_logger(__name__)

_MARGIN = timedelta(seconds=2)
"""Time that the database grants a pass beyond its deadline, for settling."""
_MOST_WAVES = 100
"""A limit, so that one hot key delays the other keys of its shard only briefly; its next messages are in the next pass."""
_TAIL = 20
"""Small last waves, together at most one part in this many of a full batch (1/20), are left to the next pass, in which they are
part of its first wave. A wave takes a round trip to the broker, however small it is."""
_MOST_UNCONFIRMED = 2
"""Probes without an answer, after which a pass sends no more. All other messages wait meanwhile."""
_MOST_AWAITED = 2
"""Full batches of a topic that the broker has and does not confirm, although it confirms others of that topic."""
_DAMAGED = "damaged"
_NEVER_DEAD = (PublishOutcome.RETURNED, PublishOutcome.FORBIDDEN)
"""The queue, or the permission, may come with the next deployment."""


@dataclass(frozen=True, kw_only=True)
class PassReport:
    """The result of one pass.

    Attributes:
        claimed: number of claimed rows; 0 means that there was nothing to do.
        locked_shards: number of shards that another session has locked.
        locked_rows: number of messages whose rows were found locked by other sessions.
        aside: number of messages that are set aside, by reason.
        settled: number of rows whose outcome is stored.
        published: of these, confirmed.
        has_more: the same shards have more messages that can be sent at once.
        broken: why the connection to the broker was lost, or None; also None if one message caused it and was identified.
        suspicious: the next pass should send fewer messages.
        overdue: reading the rows took so long that none was sent.
        highest: the highest position at which a claimed message became ready.
    """

    claimed: int = 0
    locked_shards: int = 0
    locked_rows: int = 0
    aside: Counter[Reason] = field(default_factory=Counter)
    settled: int = 0
    published: int = 0
    has_more: bool = False
    broken: str | None = None
    suspicious: bool = False
    overdue: bool = False
    highest: int = 0


@dataclass
class _Batch:
    """The claimed rows, and the broker's answers so far.

    Attributes:
        paused: by topic, the positions that were not sent because the topic is paused.
        probes: rows to be sent one by one after all others, because the broker may not answer, or close the connection.
        silent: the topics of messages that the broker has and does not confirm.
        unconfirmed: of these, the topics of probes.
        is_stuck: the broker has answered nothing to a whole wave.
        forbidden: topics that the broker does not permit, with its reason.
        outgoing: the messages to send, by position.
        damaged: by position, why the row cannot be sent.
        is_full: there are probably more messages.
        left: number of rows that are left to the next pass.
    """

    rows: Sequence[RelayedMessage]
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    paused: dict[str, list[int]] = field(default_factory=dict)
    probes: list[RelayedMessage] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    unconfirmed: set[str] = field(default_factory=set)
    is_stuck: bool = False
    forbidden: dict[str, str] = field(default_factory=dict)
    outgoing: dict[int, OutgoingMessage] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)
    broken: str | None = None
    suspicious: bool = False
    overdue: bool = False
    is_full: bool = False
    left: int = 0


class Pass:
    """Runs passes over one database and one connected transport."""

    def __init__(self, alias: str, transport: Transport, options: OutboxOptions, tally: Tally | None = None) -> None:
        self._alias = alias
        self._transport = transport
        self._options = options
        self._system = broker.system_of(options.BROKER_URL)
        self._tally = tally or Tally()
        self.topics = PausedTopics(alias, self._rate if transport.capabilities.limited else lambda topic: 0.0)
        self._readable = options.BATCH_SIZE
        self.aside = SetAside()
        self.contention = Contention(alias, options.BATCH_DEADLINE + _MARGIN, self.aside)
        self._unwritable = UnwritableRows(alias, purpose="settled", aside=self.aside)
        # Nothing but a later send depends on the outcomes, unless sending writes to this database.
        self._limits = Bounds(options.BATCH_DEADLINE + _MARGIN, is_repeatable=not transport.capabilities.transactional)

    def run(self, shards: Sequence[BusyShard], limit: int) -> PassReport:
        """Relay up to `limit` ready messages of those of the `shards` shards that are free.

        Raises:
            django.db.Error: the database failed; nothing is settled, and all claimed messages stay ready.
        """
        limit = min(limit, self._readable)
        begun_at = monotonic()
        self.take_news()
        skipped = self.aside.skipped()
        with transaction.atomic(using=self._alias, durable=True):
            claim = claiming.claim_ready(self._alias, shards, limit, skipped, self._limits)
            self.aside.forget((row.position for row in claim.rows), Reason.LOCKED)
            batch = self._send(self._writable(claim.rows), claim.begun_at, limit)
            settlement, settled = self._settle(batch)
        count_pass(self._tally, batch.rows, settlement, batch.outgoing, monotonic() - begun_at)
        self._announce(batch, settlement)
        self.contention.record(claim)
        return PassReport(
            claimed=len(batch.rows),
            locked_shards=len(claim.locked_shards),
            locked_rows=len(claim.locked_rows),
            aside=self.aside.counts(),
            settled=settled,
            published=len(settlement.published),
            has_more=batch.is_full and len(settlement.published) + batch.left == len(batch.rows),
            broken=batch.broken,
            suspicious=batch.suspicious,
            overdue=batch.overdue,
            highest=max((max(row.position, row.ready_position) for row in batch.rows), default=0),
        )

    def take_news(self) -> None:
        """Take the broker's late answers: their messages are read again, and their topics may be resumed."""
        self.topics.record(taken=self.aside.answered(self._transport.news()))

    def _writable(self, rows: Sequence[RelayedMessage]) -> Sequence[RelayedMessage]:
        """The rows that may be sent. Rows that could not be settled before are not sent before a rehearsal succeeds.

        After many such rows it may be that no row can be settled. Then all are rehearsed, so that not all are sent in vain.
        """
        are_many = self._unwritable.are_many
        doubtful = [row.position for row in rows if are_many or row.position in self._unwritable]
        if not doubtful:
            return rows
        rehearsed = settling.rehearse(self._alias, doubtful)
        self.aside.forget(rehearsed.done or (), Reason.UNWRITABLE)
        self._record_unwritable(rehearsed)
        left = set(doubtful).difference(rehearsed.done or ())
        return in_order(rows, {row.position for row in rows} - left)

    def _rate(self, topic: str) -> float:
        return self._options.topic(topic).per_second

    def _settle(self, batch: _Batch) -> tuple[Settlement, int]:
        """Store the outcomes, without those of rows that the database refuses to change; and the number of changed rows."""
        places = {row.position: row.place for row in batch.rows}
        settlement, changed = settling.settle_writable(self._alias, self._decide(batch), places)
        if self.aside:
            self.aside.forget(settlement.positions)
        self._record_unwritable(changed)
        return settlement, changed.count

    def _record_unwritable(self, changed: Changed) -> None:
        """Record rows that have not been tried alone, too: they may have been sent, and the rows after them are read next."""
        self._unwritable.record({**changed.unwritable, **changed.untried}, changed.keys)

    def _send(self, rows: Sequence[RelayedMessage], begun_at: float, limit: int) -> _Batch:
        # Counted from before the claim, so that the time in which a relay was frozen after it counts, too.
        deadline = begun_at + self._options.BATCH_DEADLINE.total_seconds()
        batch = _Batch(rows, overdue=bool(rows) and monotonic() > deadline, is_full=len(rows) >= limit)
        # First, because a message may have expired or been paused since it was sent.
        batch.verdicts.update(self.aside.answers(self._read_again(batch)))
        in_waves = waves(self._sendable(batch))
        sent_now = self._number_sent_now(in_waves, is_full=batch.is_full)
        left = [row for wave in in_waves[sent_now:] for row in wave]
        batch.left += len(left)
        left_keys = {row.key for row in left if row.key}
        # In any order, so that one topic whose probes are answered does not always come after those that are silent.
        probes = [[row] for row in random.sample(batch.probes, len(batch.probes)) if row.key not in left_keys]
        stopped_keys: set[str] = set()
        in_turn = [*((wave, False) for wave in in_waves[:sent_now]), *((one, True) for one in probes)]
        for wave, is_probe in in_turn:
            is_over = batch.is_stuck or len(batch.unconfirmed) >= _MOST_UNCONFIRMED
            if is_over or batch.broken is not None or monotonic() > deadline:
                break
            if is_probe and wave[0].topic in batch.unconfirmed:
                continue
            passed = monotonic() - begun_at
            sendable = [row for row in wave if row.key not in stopped_keys and not row.expires_within(passed)]
            self._send_wave(batch, self._formed(sendable, batch), deadline, is_probe=is_probe)
            stopped_keys.update(row.key for row in wave if row.key and batch.verdicts.get(row.position) != CONFIRMED)
        return batch

    def _number_sent_now(self, in_waves: Sequence[Sequence[RelayedMessage]], *, is_full: bool) -> int:
        """The number of waves that this pass sends."""
        number = min(len(in_waves), _MOST_WAVES)
        sizes = [len(wave) for wave in in_waves]
        if len(in_waves) > _MOST_WAVES:
            self._readable = sum(sizes[:number])
        elif 2 * len(in_waves) <= _MOST_WAVES:
            self._readable = min(2 * self._readable, self._options.BATCH_SIZE)
        if is_full:
            while number > 1 and _TAIL * sum(sizes[number - 1 :]) <= sum(sizes):
                number -= 1
        return number

    def _sendable(self, batch: _Batch) -> Iterator[RelayedMessage]:
        """The rows that may be sent together. A row that is paused, has failed, or is sent one by one, stops its key."""
        stopped_keys: set[str] = set()
        probed: set[str] = set()
        for row in batch.rows:
            verdict = batch.verdicts.get(row.position)
            if row.expired or verdict == CONFIRMED:
                continue
            if verdict is not None:
                pass  # it failed after the deadline of an earlier pass
            elif self.topics.stops(row.topic, row.position):
                batch.paused.setdefault(row.topic, []).append(row.position)
            elif row.is_blocked or row.key in stopped_keys:
                continue
            elif self.topics.is_probed(row.topic):
                if row.topic in probed and not self.topics.is_paused(row.topic):
                    batch.left += 1
                else:
                    probed.add(row.topic)
                    batch.probes.append(row)
            elif row.error_class == PublishOutcome.REFUSED.value:
                batch.probes.append(row)
            else:
                yield row
                continue
            if row.key:
                stopped_keys.add(row.key)

    def _send_wave(self, batch: _Batch, rows: Sequence[RelayedMessage], deadline: float, *, is_probe: bool) -> None:
        """Send `rows`. If the broker closes the connection because of one of them, find it by halving, and send the others.

        The remaining messages of a topic that turns out to be forbidden are not sent. A search that does not end before the
        deadline continues in the next passes, which send fewer messages.
        """
        parts, searching = [rows], False
        while parts and batch.broken is None:
            part = [row for row in parts.pop() if row.topic not in batch.forbidden]
            if not part:
                continue
            if monotonic() > deadline:
                batch.suspicious = searching
                break
            sent = self._transmit([batch.outgoing[row.position] for row in part], deadline, is_probe=is_probe)
            batch.verdicts.update(sent.verdicts)
            self.aside.expect(batch.outgoing[position] for position in sent.awaited)
            if sent.awaited and sent.broken is None:
                batch.silent.update(row.topic for row in part if row.position in sent.awaited)
                batch.unconfirmed.update([part[0].topic] if is_probe else [])
                batch.is_stuck |= not (is_probe or sent.verdicts)
            batch.forbidden.update(
                (row.topic, verdict.reason)
                for row in part
                if (verdict := sent.verdicts.get(row.position)) and verdict.outcome is PublishOutcome.FORBIDDEN
            )
            if sent.suspected:
                parts += _parts_without(part, sent)
                searching = True
            elif sent.broken is not None:
                batch.broken, batch.suspicious = sent.broken, sent.suspicious or searching

    def _transmit(self, messages: Sequence[OutgoingMessage], deadline: float, *, is_probe: bool) -> Sent:
        try:
            self._transport.connect()
        except BrokerUnavailable as error:
            return Sent(broken=str(error))
        with tracing.sending(self._system, [message.envelope for message in messages]) as span:
            if is_probe:
                sent = self._transport.probe(messages[0], deadline)
            else:
                sent = self._transport.send(messages, deadline, ends_early=True)
            if sent.broken is not None:
                tracing.failed(span, "broken connection")
            return sent

    def _read_again(self, batch: _Batch) -> Iterator[OutgoingMessage]:
        """The messages of rows that were set aside and are read again."""
        for row in batch.rows if self.aside else ():
            if row.position in self.aside:
                with suppress(DamagedRow):
                    batch.outgoing[row.position] = outgoing(row, self._options)
                    yield batch.outgoing[row.position]

    def _formed(self, rows: Iterable[RelayedMessage], batch: _Batch) -> list[RelayedMessage]:
        """Build the messages in `batch.outgoing`; return their rows. Rows that were damaged by hand are in `batch.damaged`."""
        formed: list[RelayedMessage] = []
        for row in rows:
            try:
                batch.outgoing[row.position] = outgoing(row, self._options)
            except DamagedRow as damage:
                batch.damaged[row.position] = f"its row is damaged: {damage}. Correct the row, then restore the message"
            else:
                formed.append(row)
        return formed

    def _decide(self, batch: _Batch) -> Settlement:
        """Turn the broker's answers into transitions.

        A message with an unknown outcome (deadline, closed channel) stays ready. The broker may already have it, and the inbox
        suppresses the second copy.
        """
        published: list[int] = []
        expired: list[int] = []
        waiting: list[int] = []
        unknown: list[RelayedMessage] = []
        failed: dict[tuple[Verdict, int, RetryPolicy], list[RelayedMessage]] = {}
        for row in batch.rows:
            verdict = batch.verdicts.get(row.position)
            if verdict == CONFIRMED:
                published.append(row.position)
            elif row.expired:
                expired.append(row.position)
            elif verdict is None or verdict.outcome is PublishOutcome.UNKNOWN:
                if verdict is not None:
                    unknown.append(row)
                if row.is_blocked and row.topic not in batch.paused:
                    waiting.append(row.position)
            else:
                failed.setdefault((verdict, row.attempts + 1, self._options.topic(row.topic).retry), []).append(row)
        self.aside.hold({row.position: row.key for row in unknown}, Reason.UNKNOWN)
        late = self.aside.answered(self._transport.news())
        most = _MOST_AWAITED * self._options.BATCH_SIZE
        self.topics.record(
            taken=chain(late, (row.topic for row in batch.rows if batch.verdicts.get(row.position) == CONFIRMED)),
            refused=[
                (row.topic, verdict)
                for (verdict, *_), rows in failed.items()
                if verdict.outcome is not PublishOutcome.REFUSED  # which is the fault of the message
                for row in rows
            ],
            silent=batch.silent,
            unconfirmed=batch.unconfirmed,
            crowded=[topic for topic, count in self.aside.awaited().items() if count >= most],
        )
        return Settlement(
            published=published,
            expired=expired,
            waiting=waiting,
            failed=[
                *(self._failure(rows, *failure) for failure, rows in failed.items()),
                *(
                    Failure(positions=[row], error=damage, error_class=_DAMAGED, retry_after=None)
                    for row, damage in batch.damaged.items()
                ),
            ],
            paused=batch.paused,
        )

    def _failure(self, rows: Sequence[RelayedMessage], verdict: Verdict, attempt: int, retry: RetryPolicy) -> Failure:
        if verdict.outcome in _NEVER_DEAD:
            delay: timedelta | None = self._options.unroutable_retry.delay(attempt)
        elif retry.exhausted(attempt):
            delay = None
        else:
            delay = retry.delay(attempt)
        return Failure(
            positions=[row.position for row in rows],
            error=verdict.reason,
            error_class=verdict.outcome.value,
            retry_after=delay,
            # A message that is retried without limit leaves no more trail entries than any other.
            matters=attempt <= retry.max_attempts,
        )

    def _announce(self, batch: _Batch, settlement: Settlement) -> None:
        heard = signals.message_published.has_listeners()
        if not (heard or settlement.failed or settlement.expired):
            return
        by_position = {row.position: row for row in batch.rows}
        for failure, message in ((one, by_position[position]) for one in settlement.failed for position in one.positions):
            dead = failure.retry_after is None
            # A forbidden topic is reported once, with the reason.
            level = logging.DEBUG if message.topic in batch.forbidden else logging.WARNING
            logger.log(
                logging.ERROR if dead else level,
                "relay: message %s (%s, biz-id %s) %s at attempt %d: %s.",
                message.id,
                message.topic,
                message.biz_id,
                "is dead" if dead else "was not published",
                message.attempts + 1,
                failure.error,
            )
            _send_signal(signals.message_dead if dead else signals.message_retrying, message, error=failure.error)
        for topic, count in Counter(by_position[position].topic for position in settlement.expired).items():
            logger.warning("relay: %d messages of %s have expired before they could be published.", count, topic)
        for position in settlement.expired:
            _send_signal(signals.message_expired, by_position[position])
        if heard:
            for position in settlement.published:
                _send_signal(signals.message_published, by_position[position])


def _parts_without(rows: Sequence[RelayedMessage], sent: Sent) -> list[Sequence[RelayedMessage]]:
    """The parts to send after `sent`, in reverse order.

    The broker has read the messages before the first suspected one, but their confirms were lost with the connection. They are
    sent first, so that they are confirmed before the next connection is lost. Then come the halves of the suspected ones, and
    the rest.
    """
    suspected = set(sent.suspected)
    first = next(index for index, row in enumerate(rows) if row.position in suspected)
    unknown = [[row for row in part if row.position not in sent.verdicts] for part in (rows[:first], rows[first:])]
    before, after = unknown
    searched = [row for row in after if row.position in suspected]
    half = (len(searched) + 1) // 2
    return [[row for row in after if row.position not in suspected], searched[half:], searched[:half], before]


def _send_signal(signal: Signal, message: RelayedMessage, **extra: object) -> None:
    try:
        names = {"topic": message.topic, "message_id": message.id, "biz_id": message.biz_id}
        signal.send_robust(sender=OutboxMessage, **names, **extra)
    except BaseException:
        # send_robust does not catch SystemExit, and the state is already committed.
        logger.exception("relay: a receiver of an outbox signal tried to end the process; the relay continues.")

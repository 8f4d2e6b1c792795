"""Give new handlers their past: hand the messages of history over to the inbox of the same database.

A new handler waits for its past before it receives anything new (`inbox.local`). The messages are stored in the order of
publishing, in batches. Each is one transaction with the position that it has reached, so a killed relay is continued by any
other, and no message is handed over twice.

The seam: before history is read, a relay waits until every pass that was running has ended. So each message was published
before, and is read in history, or is sent later, and is in the handler's queue. With `local://` there is no queue, and the
passes leave the handler out. There the last step locks all shards, so that no pass runs, hands over what was published since
history was read, in batches, and completes the start. If that takes too long, another round hands over the rest.

A round reads what was settled before its instant. All of that is committed when it begins, so the messages of a key are stored
in their order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from django.apps import apps
from django.db import connections, transaction
from django.utils.module_loading import import_string

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import StopRequest
from exactly_once.sql.connections import READ_COMMITTED
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.turns import Fault, Turns
from exactly_once.transport.interface import CONFIRMED, Companion, OutgoingMessage, PublishOutcome, Sent
from exactly_once.upkeep.minutes import database_time
from outbox.conf import OutboxOptions
from outbox.store import backfilling
from outbox.store.dialect import begin_bounded
from outbox.store.messages import DamagedRow, RelayedMessage, outgoing

logger = escaping_logger(__name__)

_BATCH = 200
_LONGEST_STOP_SECONDS = 2.0
"""The last step begins no further batch after this time, because no pass runs meanwhile."""
_MARGIN = timedelta(seconds=5)
_POLL_SECONDS = 2.0
_CLOCK_STEP = timedelta(seconds=2)
"""The database's clock may be set back by this much."""
_STARTS = "inbox.local.starts_on"


class Starts(Protocol):
    """The starts of the handlers of this process, see `inbox.local.Starts`."""

    def waiting(self) -> Sequence[str]: ...
    def lock(self, handler: str) -> Any | None: ...
    def queue_of(self, handler: str) -> str: ...
    def topics_of(self, handler: str) -> Sequence[str]: ...
    def hand_over(self, messages: Sequence[OutgoingMessage], deadline: float) -> Sent: ...
    def update(self, start: Any, **columns: Any) -> None: ...


def starters(alias: str, options: OutboxOptions, *, is_local: bool) -> Sequence[Companion]:
    """The companion that hands the past over; none if no handler of this process wants it."""
    # By its name, as in `outbox.transports`, because the outbox imports nothing of the inbox.
    starts = import_string(_STARTS)(alias, is_local=is_local) if apps.is_installed("inbox") else None
    return () if starts is None else (Starter(alias, options, starts, is_local=is_local),)


class Starter:
    """Hands the past over to the new handlers of one database."""

    def __init__(self, alias: str, options: OutboxOptions, starts: Starts, *, is_local: bool) -> None:
        self._alias = alias
        self._options = options
        self._starts = starts
        self._is_local = is_local
        unexpected = "relay: unexpected error in the past of a new handler on %r; it is continued later."
        self._turns = Turns("past of new handlers", unexpected, on_fault=self._on_fault)

    def run(self, stop: StopRequest) -> None:
        """Hand over until asked to stop."""
        try:
            while not stop:
                if not self.drain(stop):
                    stop.wait(_POLL_SECONDS)
        finally:
            connections.close_all()

    def drain(self, stop: StopRequest) -> int:
        """Hand over all there is; the number of messages."""
        count = 0
        for name in self._turns.take(self._alias, self._starts.waiting, stop) or ():
            step = partial(self._step, name, stop)
            while not stop and (handed := self._turns.take(self._alias, step, stop)) is not None:
                count += handed
        return count

    def _on_fault(self, fault: Fault, error: Exception) -> bool:
        return isinstance(error, _Busy)

    def _step(self, name: str, stop: StopRequest) -> int | None:
        """One batch of one handler: its number of messages; None if there is nothing to do now."""
        with self._bound():
            if (start := self._starts.lock(name)) is None:
                return None
            if start.round_at is not None:
                return self._hand_over_batch(name, start)
        backfilling.wait_for_passes(self._alias)
        if not self._is_local:
            # The round ends at its instant, which must be later than that of each message before, see `_CLOCK_STEP`.
            stop.wait(_CLOCK_STEP.total_seconds())
            if stop:
                return None
        round_at = database_time(self._alias)
        # What was settled before this instant is visible from the first batch on, so no batch overtakes a part of it.
        backfilling.wait_for_passes(self._alias)
        with self._bound():
            if (start := self._starts.lock(name)) is None or start.round_at is not None:
                return 0
            self._starts.update(start, round_at=round_at)
        logger.info("relay: begins to hand over the history of its topics to the handler %s.", name)
        return 0

    @contextmanager
    def _bound(self) -> Iterator[None]:
        """A transaction that the server ends if this process is frozen: it may hold all shards.

        With REPEATABLE READ, what was published while it waited for a lock would not be seen.
        """
        with transaction.atomic(using=self._alias):
            begin_bounded(self._alias, self._options.BATCH_DEADLINE + _MARGIN, first=READ_COMMITTED)
            yield

    def _hand_over_batch(self, name: str, start: Any) -> int:
        """The next messages of this round, and at its end the last step."""
        chosen = (self._starts.topics_of(name), start.read_from, start.round_at)
        rows, position, are_all = backfilling.read_past(self._alias, *chosen, start.position, _BATCH)
        before = int(start.handed_over)
        handed = before + self._hand_over(name, rows)
        if not are_all:
            self._starts.update(start, position=position, handed_over=handed)
        elif self._is_local:
            handed = self._hand_over_last(name, start, handed)
        else:
            self._complete(name, start, handed)
        return handed - before

    def _hand_over_last(self, name: str, start: Any, handed: int) -> int:
        """Hand over what was published since the round began, while no pass runs, and complete the start."""
        backfilling.stop_passes(self._alias)
        topics = self._starts.topics_of(name)
        since, position, until = start.round_at - _CLOCK_STEP, 0, monotonic() + _LONGEST_STOP_SECONDS
        are_all = False
        while not are_all:
            rows, position, are_all = backfilling.read_past(self._alias, topics, since, None, position, _BATCH)
            handed += self._hand_over(name, rows)
            if not are_all and monotonic() >= until:
                # Another round hands over the rest. No pass runs, so all that was settled before its instant is visible.
                self._starts.update(start, read_from=since, position=position, round_at=DatabaseTime(), handed_over=handed)
                return handed
        self._complete(name, start, handed)
        return handed

    def _complete(self, name: str, start: Any, handed: int) -> None:
        self._starts.update(start, handed_over=handed, complete_at=DatabaseTime())
        first = "the beginning" if start.since is None else str(start.since)
        transaction.on_commit(
            lambda: logger.info(
                "relay: the handler %s has its past, since %s. Messages of %s handed over, copies included: %d. It receives "
                "new ones now. If another service publishes a topic of them, run outbox_replay --to-group there.",
                name,
                first,
                ", ".join(self._starts.topics_of(name)),
                handed,
            ),
            using=self._alias,
        )

    def _hand_over(self, name: str, rows: Sequence[RelayedMessage]) -> int:
        """Store the messages in the inbox, in their order; their number."""
        queue, messages = self._starts.queue_of(name), []
        for row in rows:
            if row.expired:
                continue
            try:
                messages.append(outgoing(row, self._options, replayed=True, queue=queue))
            except DamagedRow as damage:
                logger.error("relay: message %s is not handed over to the new handler %s: %s.", row.id, name, damage)  # noqa: TRY400
        sent = self._starts.hand_over(messages, monotonic() + self._options.BATCH_DEADLINE.total_seconds())
        for message in messages:
            verdict = sent.verdicts.get(message.position)
            if verdict is None or verdict.outcome is PublishOutcome.UNKNOWN:
                raise _Busy(verdict.reason if verdict else "the deadline has passed")
            if verdict != CONFIRMED:
                logger.error(
                    "relay: message %s is not handed over to the new handler %s: %s.", message.envelope.id, name, verdict.reason
                )
        return len(messages)


class _Busy(Exception):
    """Not every message of a batch could be handed over now. It is handed over again."""

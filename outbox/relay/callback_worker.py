"""Call the project's callbacks and checkers beside the relay: claim what is due, call it, and store the result.

A callback is called until it returns. Each failed call is logged with its traceback and shown in the admin. It is logged as an
error from MAX_ATTEMPTS on. A callback runs in a transaction of the outbox's database, which delays VACUUM while the callback
waits for a network. So the database ends that transaction after CALLBACK_TIMEOUT, and the call has failed. A call that a
database outage interrupts has not failed: its claim ends, and it is due again.

A checker is called between two transactions, never inside one. The process that claims a check defers the next one, repeatedly
while the checker runs. So another process asks again if this one dies, but not while a checker hangs. An answer takes effect
only if the message is still undecided (`store.prepared_rows`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from exactly_once.process.clock import monotonic, utcnow
from exactly_once.process.logs import escaping_logger
from exactly_once.process.outage import OutageLog
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.sql.fields import value_of
from outbox import signals
from outbox.callbacks import Answer, UndecidedMessage, checkers, registry
from outbox.conf import OutboxOptions
from outbox.models import OutboxMessage
from outbox.relay.attending import Attendant, call_bounded, reason_of
from outbox.states import COMMIT, ROLL_BACK, UNDECIDED, State
from outbox.store import decision_rows, pending_callbacks, prepared_rows
from outbox.store.pending_callbacks import pending_calls

logger = escaping_logger(__name__)

_LEASE_MARGIN = timedelta(seconds=30)
"""A call is claimed for CALLBACK_TIMEOUT plus this margin; after that, a call claimed by a dead process is due again."""


def callers(alias: str, options: OutboxOptions, *, database_log: OutageLog | None = None) -> Sequence[Attendant]:
    """The attendant that calls the callbacks of this process; none without callbacks."""
    if not registry:
        return ()
    claim, threads, limit = _Claims(alias, options), options.CONCURRENCY, options.CALLBACK_TIMEOUT
    return [Attendant("callbacks", alias, claim, options, database_log, threads=threads, limit=limit)]


def askers(alias: str, options: OutboxOptions, *, database_log: OutageLog | None = None) -> Sequence[Attendant]:
    """The attendant that asks the checkers of this process; none without checkers."""
    if not checkers.topics():
        return ()
    claim, threads, limit = _Checks(alias, options).claim, options.CONCURRENCY, options.CHECKS.EVERY
    return [Attendant("checks", alias, claim, options, database_log, threads=threads, limit=limit)]


class _Claims:
    """Claims due calls, and logs once the number of pending callbacks that this process does not know."""

    def __init__(self, alias: str, options: OutboxOptions) -> None:
        self._alias = alias
        self._options = options
        self._has_looked = False

    def __call__(self, most: int, without: Collection[str]) -> list[_Callback]:
        if not self._has_looked:
            self._report_unknown()
            self._has_looked = True
        claimed = pending_callbacks.claim_calls(self._alias, most, _lease(self._options), without=without)
        return [_Callback(call, self._options) for call in claimed]

    def _report_unknown(self) -> None:
        if unknown := pending_calls(self._alias).unknown:
            logger.warning(
                "%d pending callbacks have names that this process does not know. They stay pending until a process with these "
                "callbacks calls them, or an operator discards them. Check whether a function was renamed without name=.",
                unknown,
            )


@dataclass(frozen=True)
class _Callback:
    """A claimed call, for the attendant."""

    call: pending_callbacks.DueCall
    options: OutboxOptions
    called_at: datetime = field(default_factory=utcnow)

    def __str__(self) -> str:
        return f"the callback {self.call}"

    @property
    def group(self) -> str:
        return self.call.callback

    def run(self) -> None:
        call_bounded(self.call.alias, self.options, self.call.number, self._call, self._defer)

    def _call(self) -> None:
        registry.call(self.call.callback, pending_callbacks.begin_call(self.call))
        pending_callbacks.finish_call(self.call)

    def _defer(self, error: BaseException, reason: str, delay: timedelta) -> None:
        level = logging.ERROR if self.options.retry.exhausted(self.call.number) else logging.WARNING
        became = "The callback %s failed and is called again: %s."
        if not pending_callbacks.defer_call(self.call, reason, delay):
            level = logging.WARNING
            became = "The callback %s failed, but its row was deleted or claimed by another process meanwhile: %s."
        logger.log(level, became, self.call, reason, exc_info=error)

    def extend_claim(self) -> None:
        reason = f"it was called at {self.called_at:%Y-%m-%d %H:%M:%S} UTC and has not returned yet"
        pending_callbacks.extend_call_lease(self.call, _lease(self.options), reason)

    def give_back(self) -> None:
        pending_callbacks.give_back_call(self.call)


def _lease(options: OutboxOptions) -> timedelta:
    return options.CALLBACK_TIMEOUT + _LEASE_MARGIN


class _Checks:
    """The checks that are due in one database."""

    def __init__(self, alias: str, options: OutboxOptions) -> None:
        self._alias = alias
        self._options = options
        self._report_unchecked_at = 0.0

    def claim(self, most: int, without: Collection[str]) -> list[_Check]:
        """Claim up to `most` checks, except for the topics `without`, so that no other process makes them."""
        if monotonic() >= self._report_unchecked_at:
            self._report_unchecked()
        topics = [topic for topic in checkers.topics() if topic not in without]
        due = prepared_rows.claim_checks(self._alias, topics, most, self._options.CHECKS.EVERY)
        return [_Check(self._alias, self._options, row) for row in due]

    def _report_unchecked(self) -> None:
        """Log prepared messages that no process checks, as after a deployment without their checker."""
        every = self._options.CHECKS.EVERY
        self._report_unchecked_at = monotonic() + every.total_seconds()
        for topic, count in prepared_rows.record_unchecked(self._alias, checkers.topics(), every).items():
            logger.warning(
                "%d prepared messages of the topic %r wait for a checker: none is registered here, and no other process has "
                "asked one for %s. Register one with @checker(%r), or decide about them in the admin.",
                count,
                topic,
                every,
                topic,
            )


@dataclass(frozen=True)
class _Check:
    """A claimed check of one message, for the attendant."""

    alias: str
    options: OutboxOptions
    row: OutboxMessage
    asked_at: datetime = field(default_factory=utcnow)

    def __str__(self) -> str:
        return f"the checker of {_named(_undecided(self.row))}"

    @property
    def group(self) -> str:
        return self.row.topic

    def extend_claim(self) -> None:
        reason = f"no answer yet: its checker was asked at {self.asked_at:%Y-%m-%d %H:%M:%S} UTC and has not returned"
        prepared_rows.defer_check(self.alias, self.row.pk, self.options.CHECKS.EVERY, reason)

    def give_back(self) -> None:
        prepared_rows.make_check_due(self.alias, self.row.pk)

    def run(self) -> None:
        message = _undecided(self.row)
        try:
            answer = checkers.ask(message)
        except BaseException as error:
            # Including SystemExit. An error is not counted as an answer, or a broken deployment would exhaust CHECKS["LIMIT"].
            reason = reason_of(error, self.options)
            logger.warning(
                "The checker gave no answer about %s and is asked again: %s.", _named(message), reason, exc_info=True
            )
            drop_unusable_connections()
            prepared_rows.record_no_answer(self.alias, self.row.pk, f"no answer: {reason}")
            return
        drop_unusable_connections()
        if answer is Answer.UNKNOWN:
            self._count(message)
        else:
            self._decide(message, answer)

    def _decide(self, message: UndecidedMessage, answer: Answer) -> None:
        transition = COMMIT if answer is Answer.COMMIT else ROLL_BACK
        which, reason = {"message_id": self.row.message_id}, f"its checker answered {answer}"
        decided = decision_rows.decide(self.alias, transition, [self.row.pk], which=which, reason=reason)
        state = prepared_rows.state_of(self.alias, self.row.message_id)
        if decided:
            logger.info("The checker answered %s about %s; it is %s.", answer, _named(message), state)
        elif state not in UNDECIDED and (state == State.ROLLED_BACK) != (answer is Answer.ROLLBACK):
            logger.error(
                "The checker answered %s about %s, but it is already %s: one of the two decisions is wrong. Find out what "
                "happened, and correct the effect or publish the message by hand.",
                answer,
                _named(message),
                state or "deleted",
            )

    def _count(self, message: UndecidedMessage) -> None:
        limit = self.options.CHECKS.LIMIT
        reason = f"its checker answered unknown, {message.checks + 1} of {limit} times"
        state = prepared_rows.count_unknown(self.alias, self.row.pk, message.checks, limit, reason)
        if state == State.STUCK:
            logger.error(
                "The prepared %s is stuck: %s. Find out what happened, then run outbox_resume --checks or decide in the admin.",
                _named(message),
                reason,
            )
            names = {"topic": message.topic, "message_id": str(message.id), "biz_id": message.biz_id}
            signals.message_stuck.send_robust(sender=OutboxMessage, **names, error=reason)


def _undecided(row: OutboxMessage) -> UndecidedMessage:
    payload = json.loads(bytes(row.body))
    return value_of(UndecidedMessage, row, id=row.message_id, payload=payload, checks=row.attempts)


def _named(message: UndecidedMessage) -> str:
    return f"message {message.id} ({message.topic}, biz-id {message.biz_id})"

"""Checks of prepared messages, beside the relay: claim the due ones, ask their checkers, decide by the answers.

A checker is called between two transactions, never inside one. The process that claims a check defers the next one, repeatedly
while the checker runs. So another process asks again if this one dies, but not while a checker hangs. An answer takes effect
only if the message is still undecided (`store.preparing`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction

from exactly_once.process.clock import monotonic, utcnow
from exactly_once.process.outage import OutageLog
from exactly_once.redactors import redacted_error
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.wire.text import describe
from outbox import doorbell, signals
from outbox.checkers import Answer, UndecidedMessage, checkers
from outbox.conf import OutboxOptions
from outbox.models import OutboxMessage
from outbox.relay.attending import Attendant
from outbox.states import State
from outbox.store import preparing

logger = logging.getLogger(__name__)


def askers(alias: str, options: OutboxOptions, *, database_log: OutageLog | None = None) -> Sequence[Attendant]:
    """The attendant that asks the checkers of this process; none without checkers."""
    if not checkers.topics():
        return ()
    return (
        Attendant(
            "checks",
            alias,
            Checks(alias, options).claim,
            threads=options.CHECK_THREADS,
            limit=options.CHECK_EVERY,
            grace=options.SHUTDOWN_GRACE,
            database_log=database_log,
        ),
    )


class Checks:
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
        due = preparing.claim_checks(self._alias, topics, most, self._options.CHECK_EVERY)
        return [_Check(self._alias, self._options, row, utcnow()) for row in due]

    def _report_unchecked(self) -> None:
        """Log prepared messages that no process checks, as after a deployment without their checker."""
        every = self._options.CHECK_EVERY
        self._report_unchecked_at = monotonic() + every.total_seconds()
        for topic, count in preparing.record_unchecked(self._alias, checkers.topics(), every).items():
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
    asked_at: datetime

    def __str__(self) -> str:
        return f"the checker of {_named(_undecided(self.row))}"

    @property
    def group(self) -> str:
        return self.row.topic

    def extend_claim(self) -> None:
        reason = f"no answer yet: its checker was asked at {self.asked_at:%Y-%m-%d %H:%M:%S} UTC and has not returned"
        preparing.defer_check(self.alias, self.row.pk, self.options.CHECK_EVERY, reason)

    def give_back(self) -> None:
        preparing.make_check_due(self.alias, self.row.pk)

    def run(self) -> None:
        message = _undecided(self.row)
        try:
            answer = checkers.ask(message)
        except BaseException as error:
            # Including SystemExit. An error is not counted as an answer, or a broken deployment would exhaust CHECK_LIMIT.
            reason = redacted_error(self.options.REDACT_ERRORS, f"{type(error).__name__}: {describe(error)}")
            logger.warning(
                "The checker gave no answer about %s and is asked again: %s.", _named(message), reason, exc_info=True
            )
            drop_unusable_connections()
            preparing.record_no_answer(self.alias, self.row.pk, f"no answer: {reason}")
            return
        drop_unusable_connections()
        if answer is Answer.UNKNOWN:
            self._count(message)
        else:
            self._decide(message, answer)

    def _decide(self, message: UndecidedMessage, answer: Answer) -> None:
        position = self.row.pk
        decide = preparing.commit_prepared if answer is Answer.COMMIT else preparing.roll_back_prepared
        with transaction.atomic(using=self.alias):
            decided = decide(self.alias, position, reason=f"its checker answered {answer}")
            if decided and answer is Answer.COMMIT:
                doorbell.ring_after_commit(self.alias)
        state = preparing.state_of(self.alias, self.row.message_id)
        if decided:
            logger.info("The checker answered %s about %s; it is %s.", answer, _named(message), state)
        elif (state == State.ROLLED_BACK) != (answer is Answer.ROLLBACK):
            logger.error(
                "The checker answered %s about %s, but it is already %s: one of the two decisions is wrong. Find out what "
                "happened, and correct the effect or publish the message by hand.",
                answer,
                _named(message),
                state or "deleted",
            )

    def _count(self, message: UndecidedMessage) -> None:
        limit = self.options.CHECK_LIMIT
        reason = f"its checker answered unknown, {message.checks + 1} of {limit} times"
        state = preparing.count_unknown(self.alias, self.row.pk, message.checks, limit, reason)
        if state == State.STUCK:
            logger.error(
                "The prepared %s is stuck: %s. Find out what happened, then run outbox_resume --checks or decide in the admin.",
                _named(message),
                reason,
            )
            signals.message_stuck.send_robust(sender=UndecidedMessage, message=message, error=reason)


def _undecided(row: OutboxMessage) -> UndecidedMessage:
    return UndecidedMessage(
        id=row.message_id,
        topic=row.topic,
        biz_id=row.biz_id,
        key=row.key,
        payload=json.loads(bytes(row.body)),
        headers=row.headers,
        created_at=row.created_at,
        checks=row.attempts,
    )


def _named(message: UndecidedMessage) -> str:
    return f"message {message.id} ({message.topic}, biz-id {message.biz_id})"

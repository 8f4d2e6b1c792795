"""Messages that a loop does not read for some time: a map from a position to its key, the reason, and the time of the next try.

The messages behind them are read meanwhile, except the later ones of their keys, which must not overtake them. The map is in
the memory of one loop: after a restart, and in another relay, the messages are read again.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from math import inf
from typing import Self

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.transport.interface import CONFIRMED, OutgoingMessage, PublishOutcome, Verdict
from exactly_once.wire.retry import Pause

logger = escaping_logger(__name__)

FIRST_SKIP_SECONDS = 1.0
LONGEST_SKIP_SECONDS = 30.0
_LONGEST_LOCKED_SECONDS = 10.0
_ANSWER_KEPT_SECONDS = 60.0
_UNASKED = (
    "The broker has confirmed message %s after its deadline, so it is delivered. Meanwhile it was settled by another relay, "
    "cancelled, rescheduled or changed."
)


class Reason(Enum):
    LOCKED = "another session has locked its row"
    UNKNOWN = "its outcome is unknown"
    AWAITED = "the broker has it, and may still confirm it"
    UNWRITABLE = "the database refuses to change its row"


_COSTLY = frozenset({Reason.UNKNOWN, Reason.UNWRITABLE})


@dataclass(frozen=True, slots=True)
class _Copy:
    """A message as it was sent, without its body, of which there may be many megabytes.

    Its position alone does not identify it: a failover may give it to another message, and an operator may correct the message.
    """

    message: OutgoingMessage
    digest: bytes

    @classmethod
    def of(cls, message: OutgoingMessage) -> Self:
        envelope = message.envelope
        kept = message._replace(envelope=envelope._replace(body=b""), priority=0, expires_in_seconds=None)
        return cls(kept, blake2b(envelope.body).digest())


@dataclass(slots=True)
class _Row:
    """A message that is set aside.

    Attributes:
        until: the instant (monotonic) of its next try.
        forgotten_at: when it is forgotten if it is not tried until then.
        times: how often it was set aside in a row.
        copy: of an awaited message.
        verdict: the broker's late answer.
    """

    key: str
    reason: Reason
    until: float = inf
    forgotten_at: float = inf
    times: int = 0
    pause: Pause = field(default_factory=lambda: Pause(FIRST_SKIP_SECONDS, LONGEST_SKIP_SECONDS))
    copy: _Copy | None = None
    verdict: Verdict | None = None


class SetAside:
    """The messages that one loop has set aside.

    Attributes:
        at_once: maximum number of due rows to try together whose try may fail again at a cost.
    """

    at_once = 25

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._due: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __contains__(self, position: int) -> bool:
        return position in self._rows

    def reason(self, position: int) -> Reason | None:
        row = self._rows.get(position)
        return None if row is None else row.reason

    def counts(self) -> Counter[Reason]:
        return Counter(row.reason for row in self._rows.values())

    def awaited(self) -> Counter[str]:
        """The number of messages that the broker may still confirm, by topic."""
        return Counter(row.copy.message.envelope.topic for row in self._rows.values() if row.copy and row.verdict is None)

    def skipped(self) -> Mapping[int, str]:
        """The positions of the rows that are not tried now, with the keys of their messages.

        The rows of a key are tried together: each one that is skipped would hold back the others.
        """
        self._due = set()
        if not self._rows:
            return {}
        now = monotonic()
        for position in [position for position, row in self._rows.items() if row.forgotten_at <= now]:
            self._drop(position)
        due = sorted((row.until, position) for position, row in self._rows.items() if row.until <= now)
        costly = [position for _, position in due if self._rows[position].reason in _COSTLY]
        tried = {position for _, position in due}.difference(costly[self.at_once :])
        for row in (self._rows[position] for position in tried):
            if row.reason in _COSTLY:
                row.until = now + FIRST_SKIP_SECONDS  # others are tried meanwhile, if this one is not
            if row.copy is None:
                # Then it has changed, or belongs to another process.
                row.forgotten_at = min(row.forgotten_at, now + LONGEST_SKIP_SECONDS)
        keys = {self._rows[position].key for position in tried} - {""}
        self._due = tried | {
            position for position, row in self._rows.items() if row.key in keys and row.reason is not Reason.AWAITED
        }
        return {position: row.key for position, row in self._rows.items() if position not in self._due}

    def hold(self, keys: Mapping[int, str], reason: Reason) -> None:
        """Set aside messages until their backoff ends.

        Args:
            keys: of the messages, by position.
        """
        now = monotonic()
        for position, key in keys.items():
            row = self._rows.get(position)
            if row is None or row.reason not in {reason, Reason.AWAITED}:
                row = self._rows[position] = _Row(key, reason)
            row.times += 1
            seconds = row.pause.next_seconds()
            if reason is Reason.LOCKED:
                # Most locks are short. Many that are not would fill every pass, and hide the rows after them.
                seconds = FIRST_SKIP_SECONDS if row.times == 1 else min(seconds, _LONGEST_LOCKED_SECONDS)
            row.until = now + seconds
            if row.copy is None:
                row.forgotten_at = inf

    def was_held_before(self, position: int) -> bool:
        """Was it set aside for the same reason more than once in a row?"""
        row = self._rows.get(position)
        return row is not None and row.times > 1

    def expect(self, messages: Iterable[OutgoingMessage]) -> None:
        """Set aside messages until the broker's answer has come, or cannot come any more: see `answered`."""
        for message in messages:
            row = _Row(message.envelope.key, Reason.AWAITED, copy=_Copy.of(message))
            if (lost := self._rows.get(message.position)) is not None and lost.reason is Reason.UNKNOWN:
                row.times, row.pause = lost.times, lost.pause
            self._rows[message.position] = row

    def answered(self, verdicts: Mapping[int, Verdict]) -> list[str]:
        """Record late answers, so that their messages are due; returns the topics of those that were confirmed.

        A message whose answer was lost is tried again at once, and with a backoff when that happens again.

        A failure counts, too: a message that is always returned late would otherwise be sent forever. If another relay has
        counted the failure of its own copy meanwhile, it costs the message one attempt too many.
        """
        confirmed: list[str] = []
        for position, verdict in verdicts.items():
            row = self._rows.get(position)
            if row is None or row.copy is None:
                continue
            if verdict.outcome is PublishOutcome.UNKNOWN:
                until = monotonic() + (row.pause.next_seconds() if row.times else 0.0)
                self._rows[position] = _Row(row.key, Reason.UNKNOWN, until, times=row.times + 1, pause=row.pause)
                continue
            row.verdict, row.until, row.forgotten_at = verdict, 0.0, monotonic() + _ANSWER_KEPT_SECONDS
            if verdict == CONFIRMED:
                confirmed.append(row.copy.message.envelope.topic)
        return confirmed

    def answers(self, messages: Iterable[OutgoingMessage]) -> dict[int, Verdict]:
        """The late answers to those of `messages` that were sent in this form."""
        answers: dict[int, Verdict] = {}
        for message in messages:
            row = self._rows.get(message.position)
            if row is None or row.copy is None:
                continue
            if row.verdict is not None and row.copy == _Copy.of(message):
                answers[message.position] = row.verdict  # forgotten when it is settled
            else:
                self._drop(message.position)
        return answers

    def forget(self, positions: Iterable[int], reason: Reason | None = None) -> None:
        """Forget messages that were set aside for this reason, or for any."""
        for position in positions if self._rows else ():
            if reason is None or self.reason(position) is reason:
                self._rows.pop(position, None)

    def forget_due(self, tried: Collection[int] | None = None, keys: Collection[str] | None = None) -> None:
        """Forget the rows that were due and could be changed: all that were tried again, or those among these positions.

        Args:
            keys: those whose messages were tried; None for all.
        """
        due = [position for position in self._due & self._rows.keys() if tried is None or position in tried]
        self.forget(position for position in due if keys is None or self._rows[position].key in keys)

    def _drop(self, position: int) -> None:
        """Forget a message whose answer no pass has asked for."""
        row = self._rows.pop(position)
        if row.copy is not None and row.verdict == CONFIRMED:
            logger.info(_UNASKED, row.copy.message.envelope.id)

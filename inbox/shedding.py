"""Load shedding: which deliveries are not handled because too many wait, and writing them down.

Shedding begins above the handler's limit and ends at nine tenths of it. Each reading of the queue's length allows as many to
be dropped as would bring it there, shared between the queue's consumers: so however fast they drop, and however many they are,
they hardly drop below it. Without a fresh reading nothing is dropped.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Sequence
from math import ceil

from inbox.conf import InboxOptions
from inbox.handlers import Handler, Message
from inbox.outcomes import Received, duplicate, shed
from inbox.reading import Arrival
from inbox.receiving import receive
from inbox.store import NewRow, TwinBusy
from inbox.store.shedding import store_shed
from inbox.transactions import decided
from outbox.kernel.clock import monotonic
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)

_FRESH_SECONDS = 5.0
_ENOUGH = 0.9
_TELL_EVERY_SECONDS = 10.0


class Shedder:
    """Whether deliveries of one handler are to be dropped now. Shared by all threads of this process; see `shedder_of`.

    It reads no clock but this process's own and no queue: `saw` tells it how many wait.
    """

    def __init__(self, handler: Handler) -> None:
        if handler.shed is None:
            raise ValueError(f"The handler {handler.name} has no shed.")
        self.handler = handler
        self._name = handler.name
        self._shed = handler.shed
        self._lock = threading.Lock()
        self._shedding = False
        self._lag = 0
        self._seen_at = 0.0
        self._allowance = 0
        self._told = False
        self._dropped = 0
        self._tell_at = 0.0

    def saw(self, lag: int, consumers: int = 1) -> None:
        """So many messages wait in the queue, which has so many consumers, as a passive declare answers now."""
        with self._lock:
            enough = self._shed.above * _ENOUGH
            self._lag, self._seen_at = lag, monotonic()
            before, self._shedding = self._shedding, lag > (enough if self._shedding else self._shed.above)
            self._allowance = ceil((lag - enough) / max(1, consumers)) if self._shedding else 0
            dropped = self._dropped if not self._shedding or self._seen_at >= self._tell_at else 0
            if dropped:
                self._dropped, self._tell_at = 0, self._seen_at + _TELL_EVERY_SECONDS
        if dropped:
            logger.warning("%s: %d messages have been shed; each has its row.", self._name, dropped)
        if self._shedding != before:
            logger.warning(
                "%s: %d messages wait. Shedding %s: the limit is %d.",
                self._name,
                lag,
                "begins" if self._shedding else "ends",
                self._shed.above,
            )

    @property
    def is_shedding(self) -> bool:
        """Is there any need to ask `why_shed` now?"""
        return self._allowance > 0 and monotonic() - self._seen_at < _FRESH_SECONDS

    def why_shed(self, message: Message) -> str:
        """Why `message` is dropped, or "" when it is to be handled."""
        with self._lock:
            if not self.is_shedding:
                return ""
            reason = f"{self._lag} messages waited, and shedding keeps them below {self._shed.above}"
        if not self._is_droppable(message):
            return ""
        with self._lock:
            if not self._allowance:
                return ""
            self._allowance -= 1
            return reason

    def dropped(self, count: int) -> None:
        """So many have been written down, to be told of with the next reading of the queue."""
        with self._lock:
            self._dropped += count

    def _is_droppable(self, message: Message) -> bool:
        try:
            return _answered(self._shed.droppable(message))
        except BaseException as error:  # noqa: BLE001 - the user's code, on a thread that must go on
            if not self._told:
                self._told = True
                logger.error(  # noqa: TRY400 - said once, whatever comes
                    "%s: droppable failed with %s: %s. Messages it fails on are handled, not dropped.",
                    self._name,
                    type(error).__name__,
                    describe(error),
                )
            return False


def _answered(answer: object) -> bool:
    if inspect.isawaitable(answer):
        raise TypeError(f"it answered {type(answer).__name__}, and must answer at once")
    return bool(answer)


def receive_shed(
    handler: Handler, deliveries: Sequence[tuple[Arrival, bool]], reason: str, options: InboxOptions
) -> list[Received]:
    """Write deliveries down as shed instead of handling them; what became of each, in their order.

    With each comes whether the broker has delivered it before.

    A duplicate among them is counted as one, a refused one is a dead letter, and one that a twin has in hand is put off.

    Raises:
        DatabaseAway: the database does not answer. Some may have been written down already; all may come again.
    """
    rows = [arrival.row for arrival, _ in deliveries if not arrival.refused]
    stored = _stored(handler, rows, reason, options) if rows else {}
    if (shedder := shedder_of(handler)) is not None:
        shedder.dropped(sum(became is Received.SHED for became in stored.values()))
    return [
        receive(handler, arrival, options, redelivered=redelivered)
        if arrival.refused
        else _told(handler, arrival.row, stored[id(arrival.row)], reason, redelivered=redelivered)
        for arrival, redelivered in deliveries
    ]


def _stored(handler: Handler, rows: Sequence[NewRow], reason: str, options: InboxOptions) -> dict[int, Received]:
    try:
        shed = decided(lambda: store_shed(handler.using, rows, reason, options.TWIN_TIMEOUT), handler.using)
    except TwinBusy:
        if len(rows) == 1:
            return {id(rows[0]): Received.PUT_OFF}
        return {found: became for row in rows for found, became in _stored(handler, [row], reason, options).items()}
    new = {id(row) for row in shed}
    return {id(row): Received.SHED if id(row) in new else Received.DUPLICATE for row in rows}


def _told(handler: Handler, row: NewRow, became: Received, reason: str, *, redelivered: bool) -> Received:
    if became is Received.SHED:
        return shed(handler, row, reason)
    return duplicate(handler, row, redelivered=redelivered) if became is Received.DUPLICATE else became


def shedder_of(handler: Handler) -> Shedder | None:
    """The shedder of `handler` in this process, the same for every thread; None when it sheds nothing."""
    if handler.shed is None:
        return None
    with _registering:
        shedder = _shedders.get(handler.name)
        if shedder is None or shedder.handler is not handler:
            shedder = _shedders[handler.name] = Shedder(handler)
        return shedder


_registering = threading.Lock()
_shedders: dict[str, Shedder] = {}

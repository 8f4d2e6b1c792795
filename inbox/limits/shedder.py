"""Load shedding: dropping deliveries while too many wait.

Shedding begins above the handler's limit and ends at nine tenths of it. Each reading of the queue's length allows as many drops
as bring it to that length, shared between the queue's consumers. So they hardly drop below it, however fast or many they are.
Without a fresh reading nothing is dropped.
"""

from __future__ import annotations

import inspect
import logging
import threading
from math import ceil

from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from outbox.kernel.clock import monotonic
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)

_FRESH_SECONDS = 5.0
_ENOUGH = 0.9
_TELL_EVERY_SECONDS = 10.0


class Shedder:
    """Whether deliveries of one handler are to be dropped now. Shared by all threads of this process; see `shedder_of`.

    It reads only this process's clock and no queue: `saw` reports the queue's length.
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
        """Record the number of waiting messages and consumers of the queue, from a passive declare."""
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
        """Is `why_shed` needed now?"""
        return self._allowance > 0 and monotonic() - self._seen_at < _FRESH_SECONDS

    def why_shed(self, message: Message) -> str:
        """Why `message` is dropped, or "" if it is to be handled."""
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
        """Count stored drops, to be logged with the next reading of the queue."""
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


def shedder_of(handler: Handler) -> Shedder | None:
    """The shedder of `handler` in this process, shared by all threads; None if it sheds nothing."""
    if handler.shed is None:
        return None
    with _registering:
        shedder = _shedders.get(handler.name)
        if shedder is None or shedder.handler is not handler:
            shedder = _shedders[handler.name] = Shedder(handler)
        return shedder


_registering = threading.Lock()
_shedders: dict[str, Shedder] = {}

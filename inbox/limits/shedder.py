"""Load shedding: dropping deliveries while too many wait.

Shedding begins above the handler's limit and ends at nine tenths of it. Each reading of the queue's length allows as many drops
as bring it to that length, shared between the queue's consumers. So they hardly drop below it, however fast or many they are.
Without a fresh reading nothing is dropped.
"""

import inspect
import threading
from math import ceil

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.wire.text import describe
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.handlers.options import Shed

logger = escaping_logger(__name__)

_READING_VALID_SECONDS = 5.0
_STOP_FRACTION = 0.9
_LOG_INTERVAL_SECONDS = 10.0


class Shedder:
    """Whether deliveries of one handler are to be dropped now. Shared by all threads of this process; see `shedder_of`.

    It reads only this process's clock and no queue: `record_lag` reports the queue's length.
    """

    def __init__(self, handler: Handler) -> None:
        if handler.shed is None:
            raise ValueError(f"The handler {handler.name} has no shed.")
        self._name = handler.name
        self._shed = handler.shed
        self._lock = threading.Lock()
        self._shedding = False
        self._lag = 0
        self._read_at = 0.0
        self._allowance = 0
        self._error_logged = False
        self._dropped = 0
        self._log_at = 0.0

    def record_lag(self, lag: int, consumers: int = 1) -> None:
        """Record the number of waiting messages and consumers of the queue, from a passive declare."""
        with self._lock:
            stop_at = self._shed.above * _STOP_FRACTION
            self._lag, self._read_at = lag, monotonic()
            before, self._shedding = self._shedding, lag > (stop_at if self._shedding else self._shed.above)
            self._allowance = ceil((lag - stop_at) / max(1, consumers)) if self._shedding else 0
            dropped = self._dropped if not self._shedding or self._read_at >= self._log_at else 0
            if dropped:
                self._dropped, self._log_at = 0, self._read_at + _LOG_INTERVAL_SECONDS
        if dropped:
            logger.warning("handler %s: %d messages shed; each is stored in the state shed.", self._name, dropped)
        if self._shedding != before:
            logger.warning(
                "handler %s: load shedding %s: %d messages wait, the limit is %d.",
                self._name,
                "begins" if self._shedding else "ends",
                lag,
                self._shed.above,
            )

    @property
    def is_shedding(self) -> bool:
        """May messages be dropped now?"""
        return self._allowance > 0 and monotonic() - self._read_at < _READING_VALID_SECONDS

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
            return _as_bool(self._shed.droppable(message))
        except BaseException as error:  # noqa: BLE001 - the user's code must not end this thread
            if not self._error_logged:
                self._error_logged = True
                logger.error(  # noqa: TRY400 - logged once, for all errors
                    "handler %s: Shed.droppable failed with %s: %s. Messages that it fails for are handled, not dropped.",
                    self._name,
                    type(error).__name__,
                    describe(error),
                )
            return False


def _as_bool(answer: object) -> bool:
    if inspect.isawaitable(answer):
        raise TypeError(f"it returned {type(answer).__name__}; it must return a bool")
    return bool(answer)


_shedders: dict[tuple[str, Shed], Shedder] = {}


def shedder_of(handler: Handler) -> Shedder | None:
    """The shedder of a handler, shared by all threads of this process; None if it sheds nothing."""
    if handler.shed is None:
        return None
    key = handler.name, handler.shed
    return _shedders.get(key) or _shedders.setdefault(key, Shedder(handler))

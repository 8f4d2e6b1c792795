"""Log lines of all our apps, in which text of others cannot begin a line or control a terminal.

A topic, an error and the answer of an endpoint are such text. The records of an `escaping_logger` escape their message and
traceback when a handler formats them. Their `msg` and `args` stay as they are: some handlers group by them.

`Reminder` limits the lines about a lasting condition: one at once, then one a minute.
"""

import logging
import threading
from contextlib import suppress
from math import inf
from typing import Any

from exactly_once.process.clock import monotonic
from exactly_once.wire.text import visible

_LONGEST_CHAIN = 20
_REMINDER_SECONDS = 60.0


class Reminder:
    """The limit for one event, shared by all loops of a process that may report it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reminded_at = -inf

    def is_due(self) -> bool:
        """Is it time to report it? The caller that gets True must report it."""
        with self._lock:
            now = monotonic()
            if now - self._reminded_at < _REMINDER_SECONDS:
                return False
            self._reminded_at = now
            return True


class EscapedRecord(logging.LogRecord):
    """A record whose formatted text is escaped."""

    def getMessage(self) -> str:  # noqa: N802 - of logging
        return _continued(visible(super().getMessage()))

    def __setattr__(self, name: str, value: Any) -> None:
        # A formatter stores the formatted traceback here, and reads it again.
        super().__setattr__(name, _traceback(value, self) if name == "exc_text" and value else value)


def escaping_logger(module: str) -> logging.Logger:
    """The logger of a module of ours."""
    logger = logging.getLogger(module)  # noqa: TID251 - the only one
    logger.addFilter(_escape)
    return logger


def _escape(record: logging.LogRecord) -> bool:
    kind = type(record)
    if not issubclass(kind, EscapedRecord):  # one may come from another process, as by a QueueHandler
        # The first can be pickled. A project's own factory may make records of another class.
        record.__class__ = EscapedRecord if kind is logging.LogRecord else type(kind.__name__, (EscapedRecord, kind), {})
    return True


def _traceback(text: str, record: logging.LogRecord) -> str:
    text = visible(text)
    error = record.exc_info[1] if record.exc_info else None
    for _ in range(_LONGEST_CHAIN):
        with suppress(Exception):  # a user's own __str__
            said = visible(str(error))
            text = text.replace(said, _continued(said))
        error = error and (error.__cause__ or error.__context__)
    return text


def _continued(text: str) -> str:
    """Later lines are indented, as in the log of PostgreSQL."""
    return text.replace("\n", "\n\t")

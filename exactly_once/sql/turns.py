"""One turn of a loop that works on a database, and what the loop does after an error.

No error ends a loop. The loop waits for a database that is unavailable or lacks a table, and counts no attempt. After a
collision it tries again at once; many in a row are logged once a minute. An unexpected error is logged once a minute, and the
loop pauses, longer each time.
"""

from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import TypeVar

from django.db import connections

from exactly_once.process.logs import Reminder, escaping_logger
from exactly_once.process.loop import StopRequest
from exactly_once.process.outage import Outage
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.sql.faults import is_canceled, is_collision, is_outage, remedy
from exactly_once.sql.schema import describe_missing, is_missing
from exactly_once.wire.retry import Pause
from exactly_once.wire.text import describe

logger = escaping_logger(__name__)

Result = TypeVar("Result")

_AFTER_A_COLLISION_SECONDS = 0.01
_COLLISIONS_IN_A_ROW = 100
"""So many have a lasting cause."""


class Fault(Enum):
    """What a failed turn means, see `sql.faults`."""

    OUTAGE = auto()
    COLLISION = auto()
    CANCELED = auto()
    MISSING = auto()
    """A table or a column is missing."""
    UNEXPECTED = auto()


def _fault_of(error: Exception) -> Fault:
    if is_outage(error):
        return Fault.OUTAGE
    if is_collision(error):
        return Fault.COLLISION
    if is_canceled(error):
        return Fault.CANCELED
    return Fault.MISSING if is_missing(error) else Fault.UNEXPECTED


class Turns:
    """The turns of one loop.

    Args:
        name: of the loop, begins its log lines about a missing table.
        unexpected: the log line about an unexpected error, with %r for the database.
        database: reports an outage. None: another loop of the process does, and this one tries again at its usual interval.
        errors: decides when to report; loops may share it.
        on_fault: called after a failed turn. True: it has handled the fault, and the next turn begins at once.
    """

    def __init__(
        self,
        name: str,
        unexpected: str,
        *,
        database: Outage | None = None,
        errors: Reminder | None = None,
        on_fault: Callable[[Fault, Exception], bool] = lambda fault, error: False,
    ) -> None:
        self._name = name
        self._unexpected = unexpected
        self._database = database
        self._errors = errors or Reminder()
        self._on_fault = on_fault
        self._colliding = Reminder()
        self._trouble = Pause()
        self._collisions = 0

    def take(self, alias: str, turn: Callable[[], Result], stop: StopRequest, *, raising: bool = False) -> Result | None:
        """Take a turn on this database and return its result; None if it failed, after the wait that the error requires.

        Args:
            raising: an error that waiting may not remove is raised.
        """
        try:
            drop_unusable_connections()
            result = turn()
        except Exception as error:
            if not connections[alias].in_atomic_block:  # as in a test
                connections[alias].close()
            fault = _fault_of(error)
            if not self._on_fault(fault, error):
                if raising and fault not in {Fault.OUTAGE, Fault.COLLISION}:
                    raise
                stop.wait(self._pause(fault, error, alias))
            return None
        if self._database is not None:
            self._database.over()
        self._trouble.reset()
        self._collisions = 0
        return result

    def _pause(self, fault: Fault, error: Exception, alias: str) -> float:
        """Report the error; return the seconds until the next turn."""
        if fault is Fault.COLLISION or (fault is Fault.OUTAGE and self._database is None):
            logger.debug("%s: %s", self._name, describe(error))
            self._collisions += fault is Fault.COLLISION
            if self._collisions >= _COLLISIONS_IN_A_ROW and self._colliding.is_due():
                logger.warning(
                    "%s: makes no progress on database %r: %d tries in a row collided with other transactions, the last one "
                    "with %s. It is tried again.",
                    *(self._name, alias, self._collisions, describe(error)),
                )
            return _AFTER_A_COLLISION_SECONDS
        if self._database is not None and fault is Fault.OUTAGE:
            return self._database.record(error, remedy(error, alias))
        if self._database is not None and fault is Fault.MISSING:
            return self._database.record(error, describe_error=partial(describe_missing, error, alias))
        if self._errors.is_due():
            if fault is Fault.MISSING:
                logger.error("%s: %s It is tried again.", self._name, describe_missing(error, alias))
            else:
                logger.error(self._unexpected, alias, exc_info=error)
        return self._trouble.next_seconds()

"""Makes the partitions of history for the days ahead, and drops old ones: see `exactly_once.sql.partitions`."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from math import inf

from django.db import DatabaseError, connections

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder, escaping_logger
from exactly_once.sql import faults
from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.days import date_of, day_of
from exactly_once.upkeep.history import History
from exactly_once.wire.text import describe

logger = escaping_logger(__name__)

_DAYS_AHEAD = 3
_BETWEEN_WAITS_SECONDS = 3600.0
_OWNER = (
    "housekeeping of %r: the database user of this process may not make or drop partitions of the history of the %s (%s). "
    "Messages are processed; new history is in its default partition, and old rows are deleted one by one. Make that user the "
    "owner of the tables, with the right to create tables in their schema."
)


_NAME_IN_USE = (
    "housekeeping of %r: the table %s exists, and is not a partition of the history of the %s. History of that day is in the "
    "default partition. If the table was detached, attach it again or rename it."
)


class DayKeeper:
    """The days of one history in one database.

    Args:
        longest_wait: for a lock, if a change is urgent. Others wait meanwhile, so a wait in vain, as behind a backup, is not
            repeated for an hour. None: no change waits for longer than `partitions.LONGEST_WAIT`.
    """

    def __init__(self, app: str, alias: str, history: History, longest_wait: timedelta | None = None) -> None:
        self._app, self._alias = app, alias
        self._history = history
        self._longest_wait = longest_wait
        self._refusals, self._name_in_use = Reminder(), Reminder()
        self._wait_again_at = -inf
        self._unmakeable: set[int] = set()
        self._deleted_until = 0

    def keep(self, last: int) -> None:
        """Make the partitions of the days ahead, and drop those of the days up to `last`. SQLite has none."""
        if not is_postgresql(connections[self._alias]):
            return
        days, today = self._history.days, day_of(self._alias)
        existing = days.existing(self._alias)
        for day in range(today, today + _DAYS_AHEAD + 1):
            if day not in {*existing} | self._unmakeable:
                self._attempt(days.make, day, is_urgent=day <= today + 1)
        for day in existing:
            if day > last or self._history.keeps(self._alias, day)():
                continue
            if not self._attempt(self._history.drop_day, day, is_urgent=day < last):
                return  # each try delays those who write history
            logger.info("Dropped the history of the %s of %s.", self._app, date_of(day))

    def deletions(self, last: int, *, chunk: int) -> Iterator[int]:
        """Delete the rows up to the day `last` whose days could not be dropped, once for each day; see `History`."""
        if last != self._deleted_until:
            yield from self._history.delete_days(self._alias, last, chunk=chunk)
            # Rows of a default partition are read all, so they are read once. On SQLite a row of an old day may be added.
            self._deleted_until = last if is_postgresql(connections[self._alias]) else 0

    def _attempt(self, change: Callable[[str, int, timedelta | None], bool], day: int, *, is_urgent: bool) -> bool:
        """Make or drop the partition of a day. If that is impossible now, log why; the next round tries again."""
        waits = self._longest_wait is not None and is_urgent and monotonic() >= self._wait_again_at
        try:
            return change(self._alias, day, self._longest_wait if waits else None)
        except DatabaseError as error:
            if waits and faults.sqlstate_of(error) not in {faults.CHECK_VIOLATION, faults.DUPLICATE_TABLE}:
                self._wait_again_at = monotonic() + _BETWEEN_WAITS_SECONDS
            if faults.sqlstate_of(error) == faults.INSUFFICIENT_PRIVILEGE:
                if self._refusals.is_due():
                    logger.warning(_OWNER, self._alias, self._app, describe(error))
            elif faults.sqlstate_of(error) == faults.CHECK_VIOLATION:
                self._unmakeable.add(day)
            elif faults.sqlstate_of(error) == faults.DUPLICATE_TABLE:
                if self._name_in_use.is_due():
                    logger.warning(_NAME_IN_USE, self._alias, self._history.days.name(day), self._app)
            elif faults.is_collision(error) or faults.is_canceled(error):
                # For example, a transaction that reads or writes history is open. Waiting for it would delay the others.
                logger.debug("History of %s is in use: %s", date_of(day), error)
            else:
                raise
            return False

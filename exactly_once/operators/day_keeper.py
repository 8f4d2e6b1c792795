"""Makes the partitions of history for the days ahead, and drops old ones: see `exactly_once.sql.partitions`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import timedelta
from math import inf

from django.db import DatabaseError

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder
from exactly_once.sql.days import date_of
from exactly_once.sql.faults import is_canceled, is_collision, sqlstate_of
from exactly_once.sql.partitions import CHECK_VIOLATION, INSUFFICIENT_PRIVILEGE
from exactly_once.wire.text import describe

logger = logging.getLogger(__name__)

Change = Callable[[str, int, timedelta | None], bool]
_DAYS_AHEAD = 3
_BETWEEN_WAITS_SECONDS = 3600.0
_OWNER = (
    "housekeeping of %r: the database user of this process may not make or drop partitions of the history of the %s (%s). "
    "Messages are processed; new history is in its default partition, and old rows are deleted one by one. Make that user the "
    "owner of the tables, with the right to create tables in their schema."
)


class DayKeeper:
    """The days of one table in one database.

    Args:
        make, drop: change the partition of a day; False: it was left as it is.
        longest_wait: for a lock, if a change is urgent. Others wait meanwhile, so a wait in vain, as behind a backup, is not
            repeated for an hour. None: no change waits for longer than `partitions.LONGEST_WAIT`.
    """

    def __init__(self, app: str, alias: str, make: Change, drop: Change, longest_wait: timedelta | None = None) -> None:
        self._app, self._alias = app, alias
        self._make, self._drop = make, drop
        self._longest_wait = longest_wait
        self._refusals = Reminder()
        self._wait_again_at = -inf
        self._unmakeable: set[int] = set()

    def make(self, existing: Collection[int], today: int) -> None:
        for day in range(today, today + _DAYS_AHEAD + 1):
            if day not in {*existing} | self._unmakeable:
                self._attempt(self._make, day, is_urgent=day <= today + 1)

    def drop(self, existing: Collection[int], last: int) -> None:
        for day in existing:
            if day <= last and self._attempt(self._drop, day, is_urgent=day < last):
                logger.info("Dropped the history of the %s of %s.", self._app, date_of(day))

    def _attempt(self, change: Change, day: int, *, is_urgent: bool) -> bool:
        """Make or drop the partition of a day. If that is impossible now, log why; the next round tries again."""
        waits = self._longest_wait is not None and is_urgent and monotonic() >= self._wait_again_at
        try:
            return change(self._alias, day, self._longest_wait if waits else None)
        except DatabaseError as error:
            if waits and sqlstate_of(error) != CHECK_VIOLATION:
                self._wait_again_at = monotonic() + _BETWEEN_WAITS_SECONDS
            if sqlstate_of(error) == INSUFFICIENT_PRIVILEGE:
                if self._refusals.is_due():
                    logger.warning(_OWNER, self._alias, self._app, describe(error))
            elif is_collision(error) or is_canceled(error):
                # For example, a transaction that reads or writes history is open. Waiting for it would delay the others.
                logger.debug("History of %s is in use: %s", date_of(day), error)
            elif sqlstate_of(error) == CHECK_VIOLATION:
                self._unmakeable.add(day)
            else:
                raise
            return False

"""Stored messages whose rows the database refuses to change, for example by a trigger: skipped while the others run.

A trial write, which is rolled back, shows whether the database can store at all. So an outage is not mistaken for a bad row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from django.db import DatabaseError, InterfaceError

from exactly_once.process.logs import Reminder
from exactly_once.sql.unwritable_rows import LONGEST_SKIP_SECONDS, UnwritableRows, may_be_of_one_row, why_unwritable
from inbox.models import InboxMessage
from inbox.store import trial
from inbox.store.dialect import TABLE
from inbox.store.rows import ConcurrentDuplicate

logger = logging.getLogger(__name__)

_AT_ONCE = 5
"""How many refused rows one claim finds or retries."""


class RefusedMessages(UnwritableRows):
    """The refused messages of one database, for all threads of a process."""

    def __init__(self, alias: str) -> None:
        super().__init__(at_once=_AT_ONCE)
        self._alias = alias
        self._reminder = Reminder()

    def claim_another(
        self,
        claim: Callable[[Collection[int]], InboxMessage | None],
        refused_row: Callable[[Collection[int]], int | None],
    ) -> InboxMessage | None:
        """Call `claim` without the rows that it cannot change.

        Args:
            claim: claims one message, except these rows.
            refused_row: finds the row because of which `claim` failed; None if it would not fail again.

        Raises:
            django.db.DatabaseError: a single row is not the cause.
        """
        for _ in range(_AT_ONCE):
            skipped = self.skipped()
            try:
                claimed = claim(skipped)
            except DatabaseError as error:
                if not may_be_of_one_row(error):
                    raise
                if not _can_store(self._alias) or (row := refused_row(skipped)) is None:
                    raise
                self.skip(row, error)
            else:
                if claimed is not None:
                    self.forget(claimed.pk)
                return claimed
        return None

    def skip(self, row: int, error: BaseException) -> None:
        """Skip the row until its backoff ends, and log it when the reminder is due."""
        self.record({row: error})
        if self._reminder.is_due():
            logger.error(
                "runner: the database %r refuses to change the rows of %d stored messages, so they cannot be run; the first is "
                "row %d: %s These rows are retried at least every %.0f s; other messages run.",
                self._alias,
                self.count,
                row,
                why_unwritable(error, self._alias, TABLE),
                LONGEST_SKIP_SECONDS,
            )


def _can_store(alias: str) -> bool:
    try:
        trial.try_to_store(alias)
    except (DatabaseError, InterfaceError, ConcurrentDuplicate):
        return False
    return True

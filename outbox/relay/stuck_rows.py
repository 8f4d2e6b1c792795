"""Rows that the database refuses to make ready: skipped while the others are made ready, and reported once a minute."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from exactly_once.process.reminder import Reminder
from exactly_once.sql.faults import remedy
from exactly_once.sql.refused_rows import LONGEST_SKIP_SECONDS, NO_KEYS, RefusedRows
from exactly_once.wire.text import describe
from outbox.relay.unsettled import WHAT_REFUSES

logger = logging.getLogger(__name__)

_RETRIED_AT_ONCE = 10


class StuckRows(RefusedRows):
    """The rows that one loop could not make ready by one transition."""

    def __init__(self, alias: str, component: str, reminder: Reminder | None = None) -> None:
        super().__init__(at_once=_RETRIED_AT_ONCE)
        self._alias = alias
        self._component = component
        self._reminder = reminder or Reminder()

    def record(self, refused: Mapping[int, BaseException], keys: Mapping[int, str] = NO_KEYS) -> None:
        super().record(refused, keys)
        if refused and self._reminder.is_due():
            position, error = next(iter(refused.items()))
            logger.error(
                "%s: the database refuses to change the rows of %d messages, so they cannot be made ready; the first is row "
                "%d: %s. %s They are tried again every %.0f s at least; all others continue.",
                self._component,
                len(self),
                position,
                describe(error),
                remedy(error, self._alias) or WHAT_REFUSES,
                LONGEST_SKIP_SECONDS,
            )

"""Rows that the database refuses to change: skipped while others are sent or made ready, and reported once a minute.

The relay learns that a row cannot be settled after it has sent the message, so each further try would send another copy.
Therefore it first settles such a row in a rehearsal, which is rolled back, and sends the message only if that succeeds.
Meanwhile it reads the rows after it, except for the later messages of its key, which must not overtake it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import inf

from django.db import Error

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder
from exactly_once.sql.refused_rows import LONGEST_SKIP_SECONDS, NO_KEYS, RefusedRows, why_unwritable
from outbox.store import claiming, settling
from outbox.store.claiming import RelayedMessage
from outbox.store.dialect import TABLE
from outbox.store.settling import SettledApart

logger = logging.getLogger(__name__)

_RETRIED_AT_ONCE = 10
_DOUBTFUL_SECONDS = 10.0
"""Since the last row that could not be settled was found."""


class Unsettled:
    """The rows that one relay could not settle."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._refused = RefusedRows()
        self._doubtful_until = -inf
        self._reminder = Reminder()

    def skipped(self) -> Mapping[int, str]:
        """The positions of the rows that are not tried now, with the keys of their messages."""
        return self._refused.skipped()

    def failed(self) -> None:
        """Some rows could not be settled: rehearse the rows of the next passes before sending them."""
        self._doubtful_until = monotonic() + _DOUBTFUL_SECONDS

    @property
    def is_doubtful(self) -> bool:
        """Must every row be rehearsed?"""
        return monotonic() < self._doubtful_until

    def settleable(self, rows: Sequence[RelayedMessage]) -> Sequence[RelayedMessage]:
        """The rows that may be sent. Rows that were refused before, or all rows after a failed pass, are rehearsed first.

        Raises:
            django.db.Error: none of several rows can be settled, so the cause is the database and not a row.
        """
        known = {row.position for row in rows if row.position in self._refused}
        rehearsed = rows if self.is_doubtful else [row for row in rows if row.position in known]
        if not rehearsed:
            return rows
        apart = settling.rehearse(self._alias, {row.position: row.key for row in rehearsed})
        free = set(apart.settlement.positions)
        for position in free & known:
            self._refused.forget(position)
        self.record(apart, rows)
        left = {row.position for row in rehearsed} - free
        if not left <= known:
            self.failed()
        if not free and len(new := [error for position, error in apart.refused.items() if position not in known]) > 1:
            raise new[0]
        return claiming.in_order(rows, {row.position for row in rows} - left) if left else rows

    def record(self, apart: SettledApart, rows: Sequence[RelayedMessage]) -> None:
        """Skip the refused rows, and report them if a report is due."""
        if not apart.refused:
            return
        by_position = {row.position: row for row in rows}
        self._refused.record(apart.refused, {row.position: row.key for row in rows})
        if self._reminder.is_due():
            position, error = next(iter(apart.refused.items()))
            self._report(by_position[position], error)

    def _report(self, first: RelayedMessage, error: Error) -> None:
        logger.error(
            "relay: the database refuses to change the rows of %d messages, so they cannot be settled; the first is message %s "
            "(%s, biz-id %s): %s They stay ready and are tried again every %.0f s at least, without being sent meanwhile; "
            "the later messages of their keys wait, and all others are sent.",
            len(self._refused),
            first.id,
            first.topic,
            first.biz_id,
            why_unwritable(error, self._alias, TABLE),
            LONGEST_SKIP_SECONDS,
        )


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
                "%d: %s They are tried again every %.0f s at least; all others continue.",
                self._component,
                len(self),
                position,
                why_unwritable(error, self._alias, TABLE),
                LONGEST_SKIP_SECONDS,
            )

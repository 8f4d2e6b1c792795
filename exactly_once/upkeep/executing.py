"""Execute bulk operations in the background of a relay or a consumer, batch by batch.

Each batch is one transaction under the lease of the operation, see `operation_rows`. A cancelled operation ends before its next
batch. A canary runs in waves: it waits until a wave has been run, and stops by itself when a message of it fails, as before or
in another way.
"""

import uuid
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import connections
from django.utils import translation

from exactly_once.half import required
from exactly_once.models import OperationState
from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder, escaping_logger
from exactly_once.process.loop import StopRequest
from exactly_once.sql.faults import is_collision, is_outage
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.turns import Turns
from exactly_once.transport.interface import BrokerUnavailable
from exactly_once.upkeep.operation_rows import Given, OperationTable
from exactly_once.wire.text import describe

logger = escaping_logger(__name__)

BATCH = 200
_LARGEST_WAVE = 1_000
_POLL_SECONDS, _POLL_FOR_A_WAVE_SECONDS = 10.0, 2.0
_JUDGED_AFTER = timedelta(seconds=1)
_UNKNOWN_AFTER = timedelta(seconds=60)
_MOST_ERRORS = 5


class Operations:
    """A companion of a relay or a consumer that executes the planned operations of one app.

    Args:
        aliases: the databases to search.
        on_batch: called with each operation, as it was when it was taken, after each of its batches.
    """

    def __init__(self, app: str, aliases: Collection[str], on_batch: Callable[[Any], object] = lambda operation: None) -> None:
        self._app, self._aliases, self._on_batch = app, aliases, on_batch
        self._table = OperationTable(app)
        self._token = uuid.uuid4()
        self._errors = Reminder()
        unexpected = f"{app}: unexpected error in an operation on %r; it is continued later."
        self._turns = Turns(f"{app}: no operation runs", unexpected, errors=self._errors)
        self._failures_in_a_row = 0
        self._most = _LARGEST_WAVE
        self._is_open = False

    def run(self, stop: StopRequest) -> None:
        """Execute operations until asked to stop."""
        try:
            while not stop:
                if not self._round(stop):
                    stop.wait(_POLL_FOR_A_WAVE_SECONDS if self._is_open else _POLL_SECONDS)
        finally:
            connections.close_all()

    def drain(self, stop: StopRequest) -> int:
        """Execute operations until none has a batch to run now; the number of batches."""
        batches = 0
        while not stop and (ran := self._round(stop)):
            batches += ran
        return batches

    def _round(self, stop: StopRequest) -> int:
        """Execute one operation of each database as far as it goes; the number of batches."""
        self._is_open = False
        return sum(self._turns.take(alias, partial(self._execute_one, alias, stop), stop) or 0 for alias in self._aliases)

    def _execute_one(self, alias: str, stop: StopRequest) -> int:
        operation = self._table.take(alias, self._token)
        if operation is None:
            return 0
        self._is_open = True
        try:
            return self._execute(alias, operation, stop)
        except BrokerUnavailable as error:
            if self._errors.is_due():
                logger.warning("%s: an operation on %r waits for the broker: %s", self._app, alias, error)
            return 0

    def _execute(self, alias: str, operation: Any, stop: StopRequest) -> int:
        logger.info("%s: operation %d on %r begins or continues: %s.", self._app, operation.pk, alias, operation)
        batches = 0
        while not stop:
            began_at = monotonic()
            changed = self._batch(alias, operation)
            if changed is None:
                return batches
            batches += 1
            self._on_batch(operation)
            if operation.rate:
                stop.wait(max(0.0, changed / operation.rate - (monotonic() - began_at)))
        self._table.leave(alias, operation.pk, self._token)
        return batches

    def _batch(self, alias: str, operation: Any) -> int | None:
        """One batch: the number of its rows; None if the operation has ended or waits."""
        try:
            changed = self._changed(alias, operation.pk)
        except Exception as error:
            if isinstance(error, BrokerUnavailable):
                self._most = 1
                self._table.leave(alias, operation.pk, self._token, _JUDGED_AFTER)
                raise
            if is_outage(error) or is_collision(error):
                raise
            self._failures_in_a_row += 1
            if self._failures_in_a_row < _MOST_ERRORS:
                self._table.leave(alias, operation.pk, self._token, _JUDGED_AFTER)
                raise
            logger.exception("%s: operation %d on %r is stopped: its batches fail.", self._app, operation.pk, alias)
            self._table.stop(alias, operation.pk, self._token, f"its batches fail: {type(error).__name__}: {describe(error)}")
            changed = None
        self._failures_in_a_row = 0
        return changed

    def _changed(self, alias: str, pk: int) -> int | None:
        with self._table.batch(alias, pk, self._token) as operation:
            if operation is None:
                return None
            change = required(self._app).changes.get(operation.action)
            if operation.cancelled_by:
                self._table.end(alias, operation, OperationState.CANCELLED)
                return None
            if change is None:  # planned by another version of this app
                self._table.leave(alias, pk, self._token, _UNKNOWN_AFTER)
                return None
            if not self._goes_on(alias, operation, change.canary):
                return None
            rows = self._table.next_rows(alias, operation, min(_size(operation), self._most))
            if not rows:
                self._table.end(alias, operation, OperationState.FINISHED)
                return None
            before = change.canary.failures(alias, rows) if operation.is_canary and change.canary else {}
            with translation.override(None):  # its reasons are stored, and read by users of other languages
                outcomes = change.perform(alias, rows, _given(operation))
            written: dict[str, Any] = {}
            if operation.is_canary:
                wave = [[outcome.row, before.get(outcome.row, "")] for outcome in outcomes if not outcome.unchanged]
                written = {"wave_rows": wave, "wave_at": DatabaseTime(), "wave": operation.wave + bool(wave)}
            self._table.record(alias, operation, outcomes, **written)
            self._most = min(2 * self._most, _LARGEST_WAVE)
            if len(outcomes) < len(rows):
                ended = {outcome.row for outcome in outcomes}
                self._table.put_back(alias, operation, [row for row in rows if row not in ended])
                self._most = max(1, len(outcomes))
            return len(outcomes)

    def _goes_on(self, alias: str, operation: Any, canary: Any) -> bool:
        if because := required(self._app).why_not(operation):
            self._table.end(alias, operation, OperationState.STOPPED, because)
            logger.warning("%s: operation %d on %r stops by itself, %s.", self._app, operation.pk, alias, because)
            return False
        return not (operation.wave_rows and canary) or self._has_passed(alias, operation, canary)

    def _has_passed(self, alias: str, operation: Any, canary: Any) -> bool:
        """Has the present wave been run without a failure? If not, the operation stops or waits."""
        before = dict(operation.wave_rows)
        judged = canary.judge(alias, list(before), operation.wave_at)
        counts = {
            "succeeded": operation.succeeded + len(judged.succeeded),
            "failed_again": operation.failed_again + len(judged.failed),
        }
        if judged.failed:
            because = f"wave {operation.wave}: {_failures_in_words(judged.failed, before)}"
            left = [[row, failure] for row, failure in judged.failed.items()]
            self._table.end(alias, operation, OperationState.STOPPED, because, wave_rows=left, **counts)
            logger.warning("%s: operation %d on %r stops by itself, %s.", self._app, operation.pk, alias, because)
            return False
        if judged.pending:
            self._table.leave(alias, operation.pk, self._token, _JUDGED_AFTER)
            return False
        operation.succeeded, operation.failed_again, operation.wave_rows = counts["succeeded"], counts["failed_again"], []
        self._table.record(alias, operation, (), **counts, wave_rows=[])
        return True


def _failures_in_words(failed: Mapping[int, str], before: Mapping[int, str]) -> str:
    """The failures of a wave: how many are those of before, how many are new, and the first of each."""
    ways: dict[str, list[str]] = {}
    for row, failure in failed.items():
        ways.setdefault("failed again as before" if failure == before[row] else "failed in another way", []).append(failure)
    said = (f"{len(failures):,} of {len(before):,} messages {way} ({failures[0]})" for way, failures in sorted(ways.items()))
    return ", ".join(said)


def _given(operation: Any) -> Given:
    asked = {"user": operation.requested_by, "reason": operation.reason, "values": operation.given}
    return Given(operation=operation.pk, sources=operation.sources, **asked)


def _size(operation: Any) -> int:
    most = min(10**operation.wave, _LARGEST_WAVE) if operation.is_canary else BATCH
    return min(most, operation.rate or most)

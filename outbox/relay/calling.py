"""Call the project's callbacks beside the relay: claim the due ones, call them, and retry failed ones later.

A callback is called until it returns. Each failed call is logged with its traceback and shown in the admin. It is logged as an
error from MAX_ATTEMPTS on.

A callback runs in a transaction of the outbox's database, which delays VACUUM while the callback waits for a network. So the
database ends that transaction after CALLBACK_TIMEOUT, and the call has failed. A call that a database outage interrupts has not
failed: its claim ends, and it is due again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction

from exactly_once.process.clock import monotonic, utcnow
from exactly_once.process.outage import OutageLog
from exactly_once.redactors import redacted_error
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.sql.faults import is_collision, is_outage
from exactly_once.wire.text import describe
from outbox.callbacks import registry
from outbox.conf import OutboxOptions
from outbox.operators.callbacks import pending_calls
from outbox.relay.attending import Attendant
from outbox.store import pending_callbacks
from outbox.store.dialect import begin_bounded

logger = logging.getLogger(__name__)

_LEASE_MARGIN = timedelta(seconds=30)
"""A call is claimed for CALLBACK_TIMEOUT plus this margin; after that, a call claimed by a dead process is due again."""
_AFTER_A_COLLISION = timedelta(seconds=1)
"""Delay after a deadlock or a conflict with SQLite's other writer, which are not the callback's fault."""


def callers(alias: str, options: OutboxOptions, *, database_log: OutageLog | None = None) -> Sequence[Attendant]:
    """The attendant that calls the callbacks of this process; none without callbacks."""
    if not registry:
        return ()
    return (
        Attendant(
            "callbacks",
            alias,
            _Claims(alias, options),
            threads=options.CALLBACK_THREADS,
            limit=options.CALLBACK_TIMEOUT,
            grace=options.SHUTDOWN_GRACE,
            database_log=database_log,
        ),
    )


class _Claims:
    """Claims due calls, and logs once the number of pending callbacks that this process does not know."""

    def __init__(self, alias: str, options: OutboxOptions) -> None:
        self._alias = alias
        self._options = options
        self._has_looked = False

    def __call__(self, most: int, without: Collection[str]) -> list[_Callback]:
        if not self._has_looked:
            self._report_unknown()
            self._has_looked = True
        claimed = pending_callbacks.claim_calls(self._alias, most, _lease(self._options), without=without)
        return [_Callback(call, self._options, utcnow()) for call in claimed]

    def _report_unknown(self) -> None:
        if unknown := pending_calls(self._alias).unknown:
            logger.warning(
                "%d pending callbacks have names that this process does not know. They stay pending until a process with these "
                "callbacks calls them, or an operator discards them. Check whether a function was renamed without name=.",
                unknown,
            )


@dataclass(frozen=True)
class _Callback:
    """A claimed call, for the attendant."""

    call: pending_callbacks.DueCall
    options: OutboxOptions
    called_at: datetime

    def __str__(self) -> str:
        return f"the callback {self.call}"

    @property
    def group(self) -> str:
        return self.call.callback

    def run(self) -> None:
        _call(self.call, self.options)

    def extend_claim(self) -> None:
        reason = f"it was called at {self.called_at:%Y-%m-%d %H:%M:%S} UTC and has not returned yet"
        pending_callbacks.extend_call_lease(self.call, _lease(self.options), reason)

    def give_back(self) -> None:
        pending_callbacks.give_back_call(self.call)


def _lease(options: OutboxOptions) -> timedelta:
    return options.CALLBACK_TIMEOUT + _LEASE_MARGIN


def _call(call: pending_callbacks.DueCall, options: OutboxOptions) -> None:
    began_at = monotonic()
    try:
        with transaction.atomic(using=call.alias, durable=True):
            begin_bounded(call.alias, options.CALLBACK_TIMEOUT)
            registry.call(call.callback, pending_callbacks.begin_call(call))
            pending_callbacks.finish_call(call)
    except BaseException as error:
        # Including SystemExit: the callback did not return, so it is called again.
        took = timedelta(seconds=monotonic() - began_at)
        if is_outage(error) and took < options.CALLBACK_TIMEOUT:
            raise
        _defer(call, error, took, options)


def _defer(call: pending_callbacks.DueCall, error: BaseException, took: timedelta, options: OutboxOptions) -> None:
    reason = redacted_error(options.REDACT_ERRORS, f"{type(error).__name__}: {describe(error)}")
    if took >= options.CALLBACK_TIMEOUT:
        limit = options.CALLBACK_TIMEOUT.total_seconds()
        reason += f" (it took {took.total_seconds():.1f} s, and CALLBACK_TIMEOUT is {limit:g} s)"
    delay = _AFTER_A_COLLISION if is_collision(error) else options.retry.delay(call.number)
    drop_unusable_connections()
    if not pending_callbacks.defer_call(call, reason, delay):
        logger.warning(
            "The callback %s failed, but its row was deleted or claimed by another process meanwhile: %s.",
            call,
            reason,
            exc_info=error,
        )
        return
    level = logging.ERROR if options.retry.exhausted(call.number) else logging.WARNING
    logger.log(level, "The callback %s failed and is called again: %s.", call, reason, exc_info=error)

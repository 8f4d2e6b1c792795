"""The callbacks of the project, called beside the relay: claim, call, and put off what fails.

A callback is called until it returns. Each call that fails is logged with its traceback, and written down where operators see
it; from the attempt on at which a message would be dead, as an error.

It runs in a transaction of the outbox's database, which holds back VACUUM while the callback waits for a network. So the
database ends that transaction after CALLBACK_TIMEOUT, and the call has failed. A call that a database outage interrupts has
not: it is given back.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction

from outbox import store
from outbox.callbacks import registry
from outbox.conf import OutboxOptions
from outbox.database.connections import drop_unusable_connections
from outbox.database.faults import is_collision, is_outage
from outbox.kernel.clock import monotonic, utcnow
from outbox.kernel.text import describe
from outbox.relay.attending import Attendant

logger = logging.getLogger(__name__)

_LEASE_MARGIN = timedelta(seconds=30)
"""How much longer than it may run a call is claimed. So long after that, what a dead process was about to call is due again."""
_AFTER_A_COLLISION = timedelta(seconds=1)
"""A deadlock, or SQLite's other writer, is nobody's fault."""


def callers(alias: str, options: OutboxOptions) -> Sequence[Attendant]:
    """What calls the callbacks of this process; nothing, when it has none."""
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
        ),
    )


class _Claims:
    """Claims what is due, and says once what nobody here can call."""

    def __init__(self, alias: str, options: OutboxOptions) -> None:
        self._alias = alias
        self._options = options
        self._has_looked = False

    def __call__(self, most: int, without: Collection[str]) -> list[_Callback]:
        if not self._has_looked:
            self._tell_of_unknown()
            self._has_looked = True
        claimed = store.claim_calls(self._alias, most, _lease(self._options), without=without)
        return [_Callback(call, self._options, utcnow()) for call in claimed]

    def _tell_of_unknown(self) -> None:
        if unknown := store.pending_calls(self._alias).unknown:
            logger.warning(
                "%d pending callbacks are of a name that this process does not know. They stay until one that does calls "
                "them, or they are discarded; was one renamed without name=?",
                unknown,
            )


@dataclass(frozen=True)
class _Callback:
    """A claimed call, as the attendant handles it."""

    call: store.DueCall
    options: OutboxOptions
    called_at: datetime

    def __str__(self) -> str:
        return f"the callback {self.call}"

    @property
    def group(self) -> str:
        return self.call.callback

    def run(self) -> None:
        _call(self.call, self.options)

    def keep(self) -> None:
        said = f"it was called at {self.called_at:%Y-%m-%d %H:%M:%S} UTC and has not returned yet"
        store.keep_call(self.call, _lease(self.options), said)

    def give_back(self) -> None:
        store.give_back_call(self.call)


def _lease(options: OutboxOptions) -> timedelta:
    return options.CALLBACK_TIMEOUT + _LEASE_MARGIN


def _call(call: store.DueCall, options: OutboxOptions) -> None:
    began_at = monotonic()
    try:
        with transaction.atomic(using=call.alias, durable=True):
            store.bound_call(call.alias, options.CALLBACK_TIMEOUT)
            registry.call(call.callback, store.begin_call(call))
            store.finish_call(call)
    except BaseException as error:
        # Whatever it is, also a sys.exit() of its own: it did not return, so it is called again.
        took = timedelta(seconds=monotonic() - began_at)
        if is_outage(error) and took < options.CALLBACK_TIMEOUT:
            raise
        _put_off(call, error, took, options)


def _put_off(call: store.DueCall, error: BaseException, took: timedelta, options: OutboxOptions) -> None:
    said = f"{type(error).__name__}: {describe(error)}"
    if took >= options.CALLBACK_TIMEOUT:
        limit = options.CALLBACK_TIMEOUT.total_seconds()
        said += f" (it took {took.total_seconds():.1f} s, and CALLBACK_TIMEOUT is {limit:g} s)"
    rest = _AFTER_A_COLLISION if is_collision(error) else options.retry.delay(call.number)
    drop_unusable_connections()
    if not store.put_off_call(call, said, rest):
        logger.warning("The callback %s was overtaken, or failed after its commit: %s.", call, said, exc_info=error)
        return
    level = logging.ERROR if options.retry.exhausted(call.number) else logging.WARNING
    logger.log(level, "The callback %s failed and is called again: %s.", call, said, exc_info=error)

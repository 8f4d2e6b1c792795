"""The callbacks of the project, called beside the relay: claim, call, and put off what fails.

A callback is called until it returns. Each call that fails is logged with its traceback, and written down where operators see
it; from the attempt on at which a message would be dead, as an error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from django.db import transaction

from outbox import store
from outbox.callbacks import registry
from outbox.conf import OutboxOptions
from outbox.kernel.faults import is_collision
from outbox.kernel.text import describe
from outbox.relay.attending import Attendant, Job

logger = logging.getLogger(__name__)

_LEASE = timedelta(seconds=60)
"""How long what a dead process was about to call stays put."""
_AFTER_A_COLLISION = timedelta(seconds=1)
"""A deadlock, or SQLite's other writer, is nobody's fault."""


def callers(alias: str, options: OutboxOptions) -> Sequence[Attendant]:
    """What calls the callbacks of this process; nothing, when it has none."""
    return (Attendant("callbacks", _Claims(alias, options), threads=options.CALLBACK_THREADS),) if registry else ()


class _Claims:
    """Claims what is due, and says once what nobody here can call."""

    def __init__(self, alias: str, options: OutboxOptions) -> None:
        self._alias = alias
        self._options = options
        self._has_looked = False

    def __call__(self, most: int) -> list[Job]:
        if not self._has_looked:
            self._tell_of_unknown()
            self._has_looked = True
        return [partial(_call, call, self._options) for call in store.claim_calls(self._alias, most, _LEASE)]

    def _tell_of_unknown(self) -> None:
        if unknown := store.pending_calls(self._alias).unknown:
            logger.warning(
                "%d pending callbacks are of a name that this process does not know. They stay until one that does calls "
                "them, or they are discarded; was one renamed without name=?",
                unknown,
            )


def _call(call: store.DueCall, options: OutboxOptions) -> None:
    try:
        with transaction.atomic(using=call.alias, durable=True):
            registry.call(call.callback, store.begin_call(call))
            store.finish_call(call)
    except BaseException as error:
        # Whatever it is, also a sys.exit() of its own: it did not return, so it is called again.
        rest = _AFTER_A_COLLISION if is_collision(error) else options.retry.delay(call.number)
        if not store.put_off_call(call, f"{type(error).__name__}: {describe(error)}", rest):
            logger.warning(
                "The callback %s was overtaken, or failed after its commit: %s.", call, describe(error), exc_info=True
            )
            return
        level = logging.ERROR if options.retry.exhausted(call.number) else logging.WARNING
        logger.log(level, "The callback %s failed and is called again: %s.", call, describe(error), exc_info=True)

"""The named steps of a message: each is taken once, and a retry gets its result.

A step's effect and its record are two writes in two systems. If a process dies between them, only the other system knows
whether the step has happened. A *repeatable* step is then taken again. Any other step is recorded before it begins; if a retry
finds it begun and not ended, the message becomes a dead letter, for an operator to check and decide.
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from django.core.serializers.json import DjangoJSONEncoder

from exactly_once.sql.connections import is_inside_a_transaction
from exactly_once.wire.text import describe, storable, why_unfit
from inbox.errors import LeaseLost, Reject, RetryLater, StepInterrupted
from inbox.leases.stores import Lease, renew, store_as_owner

_RESULTS = DjangoJSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


_CHECK = (
    "Check whether it has happened. If not, retry this message, which takes the step. Otherwise do the remaining steps by "
    "hand, and skip the message."
)


class Steps:
    """The steps of one run.

    Attributes:
        interrupted: why the message must stop, even if its handler caught the exception.
        in_doubt: the step that may have happened.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.interrupted: StepInterrupted | None = None
        self.in_doubt = ""

    def take(self, name: str, function: Callable[[], Any], *, repeatable: bool) -> Any:
        """See `Message.step`."""
        if inspect.iscoroutinefunction(function):
            raise TypeError(f"The step {name!r} got a coroutine function: use `await message.astep(…)`.")
        _refuse_event_loop(name)
        if (result := self._begin(name, repeatable=repeatable)) is not None:
            return json.loads(result)
        try:
            returned = function()
            _refuse_awaitable(name, returned)
        except BaseException as error:
            self._failed(name, error, repeatable=repeatable)
            raise
        return self._end(name, returned)

    async def atake(self, name: str, function: Callable[[], Awaitable[Any]], *, repeatable: bool) -> Any:
        """See `Message.astep`."""
        if not callable(function):
            raise TypeError(f"The step {name!r} got {function!r}, which is not callable: pass an async function.")
        if (result := await sync_to_async(self._begin)(name, repeatable=repeatable)) is not None:
            return json.loads(result)
        try:
            returned = await function()
        except BaseException as error:
            await sync_to_async(self._failed)(name, error, repeatable=repeatable)
            raise
        return await sync_to_async(self._end)(name, returned)

    def _begin(self, name: str, *, repeatable: bool) -> str | None:
        """The step's result if it was taken before; None: take it now."""
        self._refuse(name)
        steps = self._lease.steps
        if name in steps and steps[name] is None:
            raise self._interrupt(
                name,
                f"The step {name!r} was begun by an earlier attempt, and its outcome is unknown. {_CHECK}",
            )
        if name not in steps and not repeatable:
            self._remember(name, None)
        return steps.get(name)

    def _refuse(self, name: str) -> None:
        if reason := why_unfit(name) if name else "it is empty":
            raise ValueError(f"{name!r} is not a valid name of a step: {reason}.")
        if self.interrupted is not None:
            raise self.interrupted
        if self._lease.is_over and not renew(self._lease):
            raise LeaseLost(
                f"The step {name!r} was not taken: the lease of this run has ended, and another run may have begun."
            )
        if is_inside_a_transaction(alias := self._lease.arrival.handler.using):
            raise ValueError(
                f"The step {name!r} was not taken: it is inside `transaction.atomic()` on {alias!r}, whose rollback would "
                "delete the record of the step. Put the transaction inside the step, or after it."
            )

    def _failed(self, name: str, error: BaseException, *, repeatable: bool) -> None:
        if repeatable:
            return
        if isinstance(error, RetryLater | Reject):
            # These exceptions declare that the step has not happened.
            store_as_owner(self._lease, f"the step {name!r}", self._lease.store.forget, name)
            self._lease.steps.pop(name, None)
            return
        raise self._interrupt(
            name,
            f"The step {name!r} failed ({type(error).__name__}: {describe(error)}) and is not repeatable. {_CHECK}",
        ) from error

    def _end(self, name: str, returned: Any) -> Any:
        try:
            result = storable(_RESULTS.encode(returned))
        except (TypeError, ValueError) as error:
            raise self._interrupt(
                name,
                f"The step {name!r} was taken, but its result cannot be stored as JSON ({describe(error)}). Return a value "
                "that JSON can represent. A retry takes the step again.",
            ) from error
        self._remember(name, result)
        # A retry gets the same value.
        return json.loads(result)

    def _remember(self, name: str, result: str | None) -> None:
        remember = partial(store_as_owner, self._lease, f"the step {name!r}", self._lease.store.remember, name, result)
        if not remember() and not (renew(self._lease) and remember()):
            self._lease.lost = True
            was = "was not taken" if result is None else "was taken, but its result is not stored"
            raise LeaseLost(f"The step {name!r} {was}: the lease of this run has ended, and another run may have begun.")
        self._lease.steps[name] = result

    def _interrupt(self, name: str, reason: str) -> StepInterrupted:
        self.interrupted, self.in_doubt = StepInterrupted(reason), name
        return self.interrupted


def _refuse_awaitable(name: str, returned: Any) -> None:
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise TypeError(f"The step {name!r} returned an awaitable: use `await message.astep(…)`.")


def _refuse_event_loop(name: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"The step {name!r} was not taken: inside an async function use `await message.astep(…)`.")

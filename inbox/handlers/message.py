"""The message that a handler gets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol


class StepTaker(Protocol):
    """What remembers the steps of a message that runs under a lease."""

    def take(self, name: str, function: Callable[[], Any], *, repeatable: bool) -> Any:
        """See `Message.step`."""

    async def atake(self, name: str, function: Callable[[], Awaitable[Any]], *, repeatable: bool) -> Any:
        """See `Message.astep`."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """What a handler gets.

    Attributes:
        id: the message id, the same on every redelivery; use it as the idempotency key of calls to others.
        topic: what it is about.
        key: its ordering key, or "".
        biz_id: what it is deduplicated on.
        payload: decoded JSON.
        headers: the publisher's own.
        created_at: when it was published, by the producer's clock; None when a foreign producer did not say.
        attempt: which try this is, counted from 1.
        redelivered: it has been tried before.
        correlation_id: the first message of the chain this one belongs to, or "".
        causation_id: the message whose handler published this one, or "".
        fence: under a lease its fencing token, greater than that of any earlier run of this message; else 0.
    """

    id: str
    topic: str
    key: str
    biz_id: str
    payload: Any
    headers: Mapping[str, Any]
    created_at: datetime | None
    attempt: int
    redelivered: bool
    correlation_id: str
    causation_id: str
    fence: int = 0
    _steps: StepTaker | None = field(default=None, repr=False, compare=False)

    def step(self, name: str, function: Callable[[], Any], *, repeatable: bool = True) -> Any:
        """Take a named step once for this message: what `function` returned, now or in an earlier attempt.

        For leased handlers. The result is remembered in a commit of its own, as JSON, and comes back as JSON has it:
        a tuple is a list, a Decimal is text.

        Args:
            name: unique among the steps of this handler.
            function: called without arguments. When it raises, the step was not taken, and a retry takes it.
            repeatable: False for what must not happen twice even when this process dies in the middle, or it fails half-way. It
                is written down before it begins, and when it has not ended, the message is a dead letter for a person to decide
                about. A function that knows that nothing has happened raises RetryLater or Reject.

        Raises:
            StepInterrupted: a step that is not repeatable was begun before and has not ended, or it failed.
            LeaseLost: the lease of this run has ended; when the step was not taken, the message says so.
            RuntimeError: the handler has no lease, or this is an async function, which wants `astep`.
            ValueError: no such name, or it is inside a transaction.
        """
        return self._under_a_lease(name).take(name, function, repeatable=repeatable)

    async def astep(self, name: str, function: Callable[[], Awaitable[Any]], *, repeatable: bool = True) -> Any:
        """`step` for async handlers: what awaiting `function()` gave."""
        return await self._under_a_lease(name).atake(name, function, repeatable=repeatable)

    def _under_a_lease(self, step: str) -> StepTaker:
        if self._steps is None:
            raise RuntimeError(
                f"The step {step!r} was not taken: nothing here would remember it. Steps are for handlers under a lease "
                "(@leased_handler). A handler in a transaction needs none: its effect and its inbox row commit together."
            )
        return self._steps


BizId = Callable[[Message], object]

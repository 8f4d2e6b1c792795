"""The message that a handler gets."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Self

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Payload = TypeVar("Payload", default=Any)
    """Type checkers know its default, so that `Message` alone is `Message[Any]`; Python does not before 3.13."""
else:
    from typing import TypeVar

    Payload = TypeVar("Payload")


@dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    """An attempt that failed.

    Attributes:
        at: when it had failed, by the database's clock.
        lasted: how long the handler ran; None if it was not called, failed at its commit, or its process died.
        attempt: its number, counted from 1.
        error_class: the dotted name of the exception's class, of a built-in one its name alone; words if there was none.
        error: the reason, in words.
        traceback: "" if there was no exception.
    """

    at: datetime
    lasted: timedelta | None = None
    attempt: int
    error_class: str
    error: str
    traceback: str

    @classmethod
    def from_row(cls, stored: Mapping[str, Any]) -> Self:
        """As its row has it."""
        given = {name: stored[name] for name in ("attempt", "error", "traceback")}
        lasted = None if stored.get("seconds") is None else timedelta(seconds=stored["seconds"])
        return cls(**given, error_class=stored["class"], at=datetime.fromisoformat(stored["at"]), lasted=lasted)


@dataclass(frozen=True, kw_only=True)
class Message(Generic[Payload]):
    """A message as a handler gets it: `Message[OrderPlaced]` for a handler with `payload=OrderPlaced`.

    Attributes:
        id: the message id, the same on every redelivery; use it as the idempotency key of calls to other services.
        topic: the topic it was published to.
        key: its ordering key, or "".
        biz_id: the biz-id that it is deduplicated on.
        payload: decoded JSON; or an instance of the class in `payload=` of the handler.
        headers: the headers set by the publisher.
        created_at: when it was published, by the producer's clock; None if a foreign producer did not set it.
        attempt: the number of this attempt, counted from 1.
        redelivered: True if an earlier attempt may have run.
        correlation_id: the id of the first message of its chain, or "".
        causation_id: the id of the message whose handler published this one, or "".
        fence: the fencing token of a leased handler, greater than that of any earlier run of this message; else 0.
        error: in an `on_dead` function, how the message died: its last attempt, or why it was refused; else None.
    """

    id: str
    topic: str
    key: str
    biz_id: str
    payload: Payload
    headers: Mapping[str, Any]
    created_at: datetime | None
    attempt: int
    redelivered: bool
    correlation_id: str
    causation_id: str
    fence: int = 0
    error: FailedAttempt | None = None
    _steps: Any = field(default=None, repr=False, compare=False)
    _raw: Any = field(default=None, repr=False, compare=False)

    @property
    def raw(self) -> Any:
        """The payload as decoded JSON, also if the handler gets an instance of a class."""
        return self.payload if self._raw is None else self._raw

    def step(self, name: str, function: Callable[[], Any], *, repeatable: bool = True) -> Any:
        """Run a named step once for this message; returns the result of `function`, from now or from an earlier attempt.

        For leased handlers. The result is stored in its own commit, as JSON, and returned as JSON decodes it: a tuple becomes
        a list, a Decimal becomes text.

        Args:
            name: unique among the steps of this handler.
            function: called without arguments. If it raises, the step was not taken, and a retry takes it.
            repeatable: False for a step that must not run twice, even if this process dies during it or it fails. Its start is
                stored before it runs; if its end is not stored, the message becomes a dead letter for an operator to decide
                about. A function that is certain that it had no effect raises RetryLater or Reject.

        Raises:
            StepInterrupted: a step that is not repeatable was started before and did not end, or it failed.
            LeaseLost: the lease of this run has ended; the error says if the step was not taken.
            RuntimeError: the handler has no lease, or this is an async function, which needs `astep`.
            ValueError: the name is invalid, or the call is inside a transaction.
        """
        return self._under_a_lease(name).take(name, function, repeatable=repeatable)

    async def astep(self, name: str, function: Callable[[], Awaitable[Any]], *, repeatable: bool = True) -> Any:
        """`step` for async handlers: awaits `function()` and returns its result."""
        return await self._under_a_lease(name).atake(name, function, repeatable=repeatable)

    def _under_a_lease(self, step: str) -> Any:
        """The `inbox.leases.steps.Steps` of this run."""
        if self._steps is None:
            raise RuntimeError(
                f"The step {step!r} was not taken: this handler has no lease, so its result would not be stored. Steps are for "
                "leased handlers (@leased_handler). Other handlers need none: effect and inbox row commit together."
            )
        return self._steps


BizId = Callable[[Message], object]

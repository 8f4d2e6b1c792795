"""Exceptions that a handler may raise, and errors of the inbox."""

from datetime import timedelta

from exactly_once.wire.durations import parse_duration

_LONGEST_DELAY = timedelta(days=3650)


class InboxError(Exception):
    """The base class of the inbox's errors."""


class RetryLater(InboxError):
    """Defer the message without a failure: the effect is rolled back, and the message is run again after `delay`.

    Args:
        delay: at least a second; default: the delay after a failed attempt. A deferral is not counted as an attempt.
        reason: shown to operators until the next run.
        give_up_after: how long after its arrival the message may be deferred. It is run once more at that time; if it raises
            RetryLater again, it becomes a dead letter with this reason; default: unbounded.

    Raises:
        TypeError: `delay` or `give_up_after` is neither a timedelta nor text.
        ValueError: `delay` exceeds 3650 days, or `give_up_after` is not longer than zero.
    """

    def __init__(
        self,
        delay: timedelta | str | None = None,
        reason: str = "the handler raised RetryLater",
        *,
        give_up_after: timedelta | str | None = None,
    ) -> None:
        self.delay = None if delay is None else parse_duration("RetryLater: delay", delay)
        self.give_up_after = None if give_up_after is None else parse_duration("RetryLater: give_up_after", give_up_after)
        if self.delay is not None and self.delay > _LONGEST_DELAY:
            raise ValueError(f"RetryLater: delay is {delay!r}: it must not exceed {_LONGEST_DELAY.days} days.")
        if self.give_up_after is not None and self.give_up_after <= timedelta():
            raise ValueError(f"RetryLater: give_up_after is {give_up_after!r}: it must be longer than zero.")
        super().__init__(reason)


class Reject(InboxError):
    """Do not retry: the effect is rolled back, and the message becomes a dead letter, with `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class StepInterrupted(Reject):
    """A step may have happened and must not be repeated: a dead letter for an operator to decide about."""


class LeaseLost(InboxError):
    """The lease of this run has ended, so another process may be running the message. This run settles nothing."""


class TransactionBroken(InboxError):
    """The handler returned normally, but the transaction around it can no longer commit.

    It swallowed a database error or closed the connection. An acknowledgement would now lose the message, so this is a failed
    attempt.
    """


class TransactionEnded(InboxError):
    """The handler committed or rolled back its transaction, so its effect may be partial.

    A retry could repeat the committed part. Without a retry the other part could be missing. So the message is a dead letter
    for an operator to decide about.

    Attributes:
        is_stored: the dead letter is already stored; the handler's own commit included its inbox row.
    """

    def __init__(self, reason: str, *, is_stored: bool = False) -> None:
        super().__init__(reason)
        self.is_stored = is_stored


class TransactionControl(InboxError):
    """The handler executed SQL that begins or ends a transaction. The inbox row and the effect must commit together."""


class NotCallable(InboxError, TypeError):
    """The handler is a generator function, does not accept its argument, or returned an awaitable or an iterator."""


class HandlerTimeout(BaseException):
    """A handler took longer than its `timeout`: a failed attempt.

    A BaseException, so that `except Exception` in a handler does not catch it.
    """

    def __init__(self, what: str = "the handler", limit: timedelta | None = None) -> None:
        super().__init__(f"{what} took longer than its timeout" + (f" of {limit.total_seconds():g} s" if limit else ""))


class NotRun(InboxError):
    """The inbox does not run a Celery task, for this reason: it is a dead letter, was skipped, or is too old."""


class NotEditable(InboxError):
    """An operator's correction of a message is refused, for this reason; the row is unchanged."""


class TaskNotSent(InboxError):
    """An operator's retry of a Celery task could not be sent; the row is unchanged."""


class UnknownHandler(InboxError, ValueError):
    """No handler has this name. To pause or resume one, it is enough that a stored message has it."""

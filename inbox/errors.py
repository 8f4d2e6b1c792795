"""What a handler may raise on purpose, and what can go wrong around it."""

from __future__ import annotations

from datetime import timedelta

_LONGEST_DELAY = timedelta(days=3650)


class InboxError(Exception):
    """The root of everything this app raises on purpose."""


class RetryLater(InboxError):
    """Not now, and this is no failure: the effect is rolled back and the message comes again after `delay`.

    Args:
        delay: at least a second; default: as after a failure. It counts as no attempt, however often it is raised.
        reason: for the people who look at the message meanwhile.
        give_up_after: how long after its arrival the message may still be deferred. It is tried once more at that time, and
            when this is raised again it is a dead letter, with the reason; default: unbounded.

    Raises:
        TypeError: `delay` or `give_up_after` is no timedelta.
        ValueError: `delay` is longer than 3650 days, or `give_up_after` is not longer than zero.
    """

    def __init__(
        self,
        delay: timedelta | None = None,
        reason: str = "the handler asked for a later time",
        *,
        give_up_after: timedelta | None = None,
    ) -> None:
        if delay is not None and not isinstance(delay, timedelta):
            raise TypeError(f"RetryLater takes a timedelta, not {delay!r}: write timedelta(seconds=…).")
        if delay is not None and delay > _LONGEST_DELAY:
            raise ValueError(f"RetryLater({delay!r}): the longest delay is {_LONGEST_DELAY.days} days.")
        if give_up_after is not None and not isinstance(give_up_after, timedelta):
            raise TypeError(f"RetryLater takes a timedelta as give_up_after, not {give_up_after!r}: write timedelta(days=…).")
        if give_up_after is not None and give_up_after <= timedelta():
            raise ValueError(f"RetryLater(give_up_after={give_up_after!r}): it must be longer than zero.")
        super().__init__(reason)
        self.delay = delay
        self.give_up_after = give_up_after


class Reject(InboxError):
    """Never: the effect is rolled back and the message is a dead letter now, for `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class StepInterrupted(Reject):
    """A step may have happened and may not, and is not to be repeated: a dead letter for a person to decide about."""


class LeaseLost(InboxError):
    """The lease of this run has ended, so another may be running the message. Nothing that this run does is settled."""


class TransactionBroken(InboxError):
    """The handler returned normally, but the transaction around it can no longer commit.

    It swallowed a database error or closed the connection. Acknowledging the message now would lose it, so this is a failed
    attempt.
    """


class TransactionEnded(InboxError):
    """The handler committed or rolled back by itself, so what it did may be there in part.

    Running it again might repeat that part, and leaving it might miss the rest: the message is a dead letter for a person to
    decide about.

    Attributes:
        is_stored: the dead letter is stored already; what the handler committed by itself included its inbox row.
    """

    def __init__(self, reason: str, *, is_stored: bool = False) -> None:
        super().__init__(reason)
        self.is_stored = is_stored


class TransactionControl(InboxError):
    """The handler tried to begin or end a transaction by SQL. The inbox row and the effect must commit together."""


class NotCallable(InboxError, TypeError):
    """A handler that cannot be called as one: a generator function, or a result that is still to be run."""


class HandlerTimeout(BaseException):
    """A handler took longer than its `timeout`: a failed attempt.

    No Exception, so that a handler that catches those does not catch this.
    """

    def __init__(self, what: str = "it", limit: timedelta | None = None) -> None:
        super().__init__(f"{what} took longer than its timeout" + (f" of {limit.total_seconds():g} s" if limit else ""))


class NotRun(InboxError):
    """A Celery task that the inbox does not run, with the reason: it is a dead letter, was skipped, or is too old."""


class NotEditable(InboxError):
    """An operator's correction of a message is refused, with the reason; the row stays as it was."""


class TaskNotSent(InboxError):
    """An operator's retry of a Celery task could not be sent; the row stays as it was."""

"""What a handler may raise on purpose, and what can go wrong around it."""

from __future__ import annotations

from datetime import timedelta


class InboxError(Exception):
    """The root of everything this app raises on purpose."""


class RetryLater(InboxError):
    """Not now, and nobody's fault: the effect is rolled back and the message comes again after `delay`.

    Args:
        delay: the rest; default: as after a failure. It counts as no attempt, however often it is raised.
        reason: for the people who look at the message meanwhile.
    """

    def __init__(self, delay: timedelta | None = None, reason: str = "the handler asked for a later time") -> None:
        super().__init__(reason)
        self.delay = delay


class Reject(InboxError):
    """Never: the effect is rolled back and the message is a dead letter now, for `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class TransactionBroken(InboxError):
    """The handler returned normally, but the transaction around it can no longer commit, or is not ours any more.

    It swallowed a database error, closed the connection, or ended the transaction. Acknowledging the message now would
    lose it, so this is a failed attempt.
    """


class TransactionControl(InboxError):
    """The handler tried to begin or end a transaction by SQL. The inbox row and the effect must commit together."""


class NotCallable(InboxError, TypeError):
    """A handler that cannot be called as one: a generator function, or a result that is still to be run."""

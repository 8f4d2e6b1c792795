"""Errors of publishing a message and of deciding about it. Every error names the value and the remedy, and is raised before a
row is written."""

import uuid


class OutboxError(Exception):
    """The base class of this app's errors."""


class PublishedOutsideTransaction(OutboxError):
    """publish() was called without an open transaction: the row would commit separately from the business change.

    Async code cannot open a transaction: Django's transactions belong to one thread and work in synchronous code only. Put the
    business change and publish() into one synchronous function and await it:

        await sync_to_async(transaction.atomic(place_order))(customer)

    Attributes:
        alias: of the database.
    """

    def __init__(self, alias: str, *, is_async: bool = False) -> None:
        self.alias = alias
        using = "" if alias == "default" else f"using={alias!r}"
        if is_async:
            atomic = f"atomic({using})" if using else "atomic"
            remedy = (
                "async code cannot open one. Put the business change and publish() into one synchronous function and call it "
                f"with `await sync_to_async(transaction.{atomic}(function))()`. An async handler, whose transaction is open, "
                "calls `await apublish()`."
            )
        else:
            remedy = (
                f"call it inside `with transaction.atomic({using}):`, together with the business change. "
                "Otherwise a crash between the two loses one of them."
            )
        super().__init__(f"publish() needs an open transaction on the database {alias!r}: {remedy}")


class InvalidMessage(OutboxError, ValueError):
    """A message that cannot be published in its present form."""


class UnknownMessage(OutboxError, ValueError):
    """The arguments cannot identify a message."""


class PayloadTooLarge(InvalidMessage):
    """The serialised payload exceeds the limit."""


class PreparedInsideTransaction(OutboxError):
    """prepare() was called inside a transaction: the row would be lost when the process dies, and is not needed."""

    def __init__(self, alias: str) -> None:
        super().__init__(
            f"prepare() commits its own row on the database {alias!r}, and a transaction is open there: call it before "
            "`atomic()` begins. If the effect is in the same database, call publish() instead, in the effect's transaction."
        )


class NoChecker(OutboxError):
    """prepare() was called for a topic without a checker: after a crash the message would stay undecided."""

    def __init__(self, topic: str, known: list[str]) -> None:
        super().__init__(
            f"The topic {topic!r} has no checker, so its message would stay undecided after a crash: register one with "
            f"@checker({topic!r}) in the callbacks.py of an installed app. Topics with a checker: "
            f"{', '.join(sorted(known)) or 'none'}."
        )


class AlreadyDecided(OutboxError):
    """A prepared message cannot be committed or rolled back, because the opposite was decided before.

    Attributes:
        message_id: of the message.
        state: its present state, or its last if its row is deleted; "" if it is unknown, because its trail is deleted, too.
    """

    def __init__(self, message_id: uuid.UUID, wish: str, state: str) -> None:
        self.message_id, self.state = message_id, state
        known = f"your code, its checker or an operator decided otherwise before, it is {state}"
        unknown = "its row no longer exists, and its trail has no decision: find out whether it was published"
        super().__init__(
            f"The prepared message {message_id} cannot be {wish}: {known if state else unknown}. If the effect has happened and"
            " the message will not be published, undo the effect by hand, or publish the message again. If the effect has not"
            " happened, cancel the message, or undo by hand what its handlers have done. A checker must answer ROLLBACK only if"
            " it has made sure that the effect cannot happen any more."
        )

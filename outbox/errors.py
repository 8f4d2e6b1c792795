"""What can go wrong when a message is published or decided about. Every error names the value and the remedy, and is raised
before a row is written."""

from __future__ import annotations

import uuid


class OutboxError(Exception):
    """The root of everything this app raises on purpose."""


class PublishedOutsideTransaction(OutboxError):
    """publish() was called where no transaction is open: the row would commit alone, apart from the business change.

    Async code cannot open a transaction: Django's belong to one thread, and work in synchronous code only. There the business
    change and publish() go into one synchronous function, which is awaited:

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
                f"call it inside `with transaction.atomic({using}):`, together with the business change it tells about. "
                "Otherwise a crash between the two loses one of them."
            )
        super().__init__(f"publish() needs an open transaction on the database {alias!r}: {remedy}")


class InvalidMessage(OutboxError, ValueError):
    """A message that cannot be published as it is."""


class UnknownMessage(OutboxError, ValueError):
    """A message was named in a way that no message is."""


class PayloadTooLarge(InvalidMessage):
    """The serialised payload is over the limit."""


class PreparedInsideTransaction(OutboxError):
    """prepare() was called inside a transaction: the row would not be there when the process dies, and is not needed."""

    def __init__(self, alias: str) -> None:
        super().__init__(
            f"prepare() commits a row of its own on the database {alias!r}, and a transaction is open there: call it before "
            "`atomic()` begins. If the effect is in that very database, no prepared message is needed: call publish() beside "
            "the effect, in its transaction."
        )


class NoChecker(OutboxError):
    """A message was prepared whose topic has no checker: a crash would leave it undecided for ever."""

    def __init__(self, topic: str, known: list[str]) -> None:
        super().__init__(
            f"The topic {topic!r} has no checker, so nobody could say what became of its message after a crash: register one "
            f"with @checker({topic!r}) in the callbacks.py of an installed app. Topics with a checker: "
            f"{', '.join(sorted(known)) or 'none'}."
        )


class AlreadyDecided(OutboxError):
    """A prepared message was to be committed or rolled back, and the opposite was decided before.

    Attributes:
        message_id: of the message.
        state: that it is in now; "" when its row is gone.
    """

    def __init__(self, message_id: uuid.UUID, wish: str, state: str) -> None:
        self.message_id, self.state = message_id, state
        was = f"is {state}: its checker or an operator decided otherwise" if state else "is not here any more"
        super().__init__(
            f"The prepared message {message_id} was to be {wish}, and it {was} before. Its business must be undone by hand, or "
            "its message published anew. A checker must answer ROLLBACK only when it has made sure that nothing comes any more."
        )

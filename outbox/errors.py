"""What can go wrong when a message is published or decided about. Every error names the value and the remedy, and is raised
before a row is written."""

from __future__ import annotations


class OutboxError(Exception):
    """The root of everything this app raises on purpose."""


class PublishedOutsideTransaction(OutboxError):
    """publish() was called where no transaction is open: the row would commit alone, apart from the business change."""

    def __init__(self, alias: str) -> None:
        super().__init__(
            f"publish() needs an open transaction on the database {alias!r}: call it inside "
            f"`with transaction.atomic({'' if alias == 'default' else f'using={alias!r}'}):`, together with the business "
            "change it tells about. Otherwise a crash between the two loses one of them."
        )


class InvalidMessage(OutboxError, ValueError):
    """A message that cannot be published as it is."""


class UnknownMessage(OutboxError, ValueError):
    """A message was named in a way that no message is."""


class PayloadTooLarge(InvalidMessage):
    """The serialised payload is over the limit."""

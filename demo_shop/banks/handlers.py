"""Book at the giro bank what was withdrawn at the savings bank."""

from __future__ import annotations

from demo_shop.banks.services import TRANSFER, deposit
from inbox import Message, idempotent_handler


@idempotent_handler(TRANSFER)
def book_deposit(message: Message) -> None:
    deposit(message.payload["transfer"], message.payload["holder"], message.payload["amount"])

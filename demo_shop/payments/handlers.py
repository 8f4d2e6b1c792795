"""Request payment for reserved goods. The provider's notifications arrive as messages, too."""

from __future__ import annotations

from decimal import Decimal

from demo_shop.payments import services
from inbox import Message, idempotent_handler


@idempotent_handler("stock.reserved")
def request_payment(message: Message) -> None:
    services.request_payment(message.payload["order"], Decimal(message.payload["total"]))


@idempotent_handler("payment.notified")
def accept_payment(message: Message) -> None:
    """If the payment is not committed yet, this fails and is retried; one that was never requested becomes a dead letter."""
    services.accept(message.biz_id, message.payload["payment"], Decimal(message.payload["amount"]))

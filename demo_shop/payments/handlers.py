"""Goods that are reserved are to be paid."""

from __future__ import annotations

from decimal import Decimal

from demo_shop.payments import services
from inbox import Message, idempotent_handler


@idempotent_handler("stock.reserved")
def request_payment(message: Message) -> None:
    services.request_payment(message.payload["order"], Decimal(message.payload["total"]))

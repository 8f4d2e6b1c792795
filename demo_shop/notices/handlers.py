"""A while after an order its customer is told that it goes well. When that is, the message knows: it comes when it is due."""

from __future__ import annotations

from demo_shop.notices.models import Sms
from inbox import Message, idempotent_handler


@idempotent_handler("shop.order.sms_due")
def send_sms(message: Message) -> None:
    Sms.objects.create(order=message.payload["order"], customer=message.payload["customer"])

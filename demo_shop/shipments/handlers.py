"""Ship the orders that are paid."""

from __future__ import annotations

from demo_shop.shipments.models import Shipment
from inbox import Message, idempotent_handler
from outbox import publish


@idempotent_handler("payment.received")
def send_parcel(message: Message) -> None:
    order = message.payload["order"]
    Shipment.objects.create(order=order)
    publish("shipments.exported", {"order": order}, biz_id=f"shipment-export-{order}", key=f"order-{order}")
    publish("shipment.sent", {"order": order}, biz_id=f"shipment-{order}", key=f"order-{order}")

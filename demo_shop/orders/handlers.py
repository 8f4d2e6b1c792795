"""The messages that change an order, from the other apps and from `services` with a delay."""

from __future__ import annotations

from datetime import timedelta

from demo_shop.orders import services
from demo_shop.orders.models import Order
from inbox import Message, Reject, idempotent_handler
from inbox.contrib.joins import Join, joined_handler


@idempotent_handler("payment.received")
def mark_paid(message: Message) -> None:
    services.mark_paid(_order_of(message))


@idempotent_handler("shipment.sent")
def mark_shipped(message: Message) -> None:
    services.mark_shipped(_order_of(message))


@joined_handler(all_of=["payment.received", "shipment.sent"], correlate="order", deadline=timedelta(hours=2))
def report_sale(join: Join) -> None:
    services.report_sale(join.run_id)


@idempotent_handler("shop.order.unpaid")
def remind(message: Message) -> None:
    services.remind(_order_of(message))


@idempotent_handler("shop.order.rate_by_itself")
def rate_by_itself(message: Message) -> None:
    services.close_rating(_order_of(message))


def _order_of(message: Message) -> str:
    number = str(message.payload["order"])
    if not Order.objects.filter(number=number).exists():
        raise Reject(f"There is no order {number}.")
    return number

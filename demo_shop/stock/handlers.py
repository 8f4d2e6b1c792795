"""Reserve the goods of an order, and ship them when they are paid."""

from __future__ import annotations

from django.conf import settings

from demo_shop.stock import services
from demo_shop.stock.models import Product
from inbox import Message, Reject, RetryLater, idempotent_handler


@idempotent_handler("shop.order.placed", biz_id=lambda message: message.payload["order"])
def reserve_stock(message: Message) -> None:
    wanted = message.payload
    try:
        services.reserve(wanted["order"], wanted["product"], wanted["quantity"], wanted["total"])
    except services.OutOfStock as error:
        raise RetryLater(settings.SHOP_OUT_OF_STOCK_RETRY, f"{wanted['product']} is out of stock") from error
    except Product.DoesNotExist as error:
        raise Reject(f"There is no product {wanted['product']}.") from error


@idempotent_handler("payment.received")
def send_parcel(message: Message) -> None:
    services.ship(message.payload["order"])

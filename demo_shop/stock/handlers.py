"""Reserve the goods of an order, and publish that for the app that requests the payment."""

from __future__ import annotations

from django.conf import settings

from demo_shop.stock.models import Product
from demo_shop.stock.services import OutOfStock, reserve
from inbox import Message, Reject, RetryLater, idempotent_handler


@idempotent_handler("shop.order.placed", biz_id=lambda message: message.payload["order"])
def reserve_stock(message: Message) -> None:
    wanted = message.payload
    try:
        reserve(wanted["order"], wanted["product"], wanted["quantity"], wanted["total"])
    except OutOfStock as error:
        raise RetryLater(settings.SHOP_OUT_OF_STOCK_RETRY, f"{wanted['product']} is out of stock") from error
    except Product.DoesNotExist as error:
        raise Reject(f"There is no product {wanted['product']}.") from error

"""The smallest honest shop: apps that know each other's messages and nothing else of each other.

    orders ── shop.order.placed ──> stock ── stock.reserved ──> payments ── payment.received ──> shipments
       ▲                                                                          │                  │
       └──────────────────────────────────────────────────────────────────────────┴── shipment.sent ─┘

Beside them, on time: an SMS 20 minutes after an order and a request for a review after an hour (`notices`), a reminder after
30 minutes if it is not paid, a rating of five stars 48 hours after its parcel unless the customer gave one (`orders`). An order
that is taken back in time takes its messages back with it. A receipt that the mail provider refuses is sent again 10 minutes
later (`notices`).

And, next door, two banks with a database each, and transfers between them (`banks`).

`manage.py demo` buys from it with many hands, kills its processes meanwhile, and counts afterwards.
"""

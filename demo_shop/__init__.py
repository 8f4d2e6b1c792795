"""A small shop as an example: apps that know each other's messages and nothing else of each other.

    orders ── shop.order.placed ──> stock ── stock.reserved ──> payments ── payment.received ──> shipments
       ▲                                                                          │                  │
       └──────────────────────────────────────────────────────────────────────────┴── shipment.sent ─┘

Messages with a delay: an SMS 20 minutes after an order and a request for a review after an hour (`notices`), a reminder after
30 minutes if it is not paid, a rating of five stars 48 hours after its shipment unless the customer gave one (`orders`). An
order that is cancelled in time also cancels its messages. A receipt that the mail provider refuses is sent again 10 minutes
later (`notices`).

Two banks with a database each exchange transfers (`banks`).

`manage.py demo` simulates many customers, kills processes of the shop, and audits the result.
"""

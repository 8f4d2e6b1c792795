"""The smallest honest shop: four apps that know each other's messages and nothing else of each other.

    orders ── shop.order.placed ──> stock ── stock.reserved ──> payments ── payment.received ──> shipments
       ▲                                                                          │                  │
       └──────────────────────────────────────────────────────────────────────────┴── shipment.sent ─┘

`manage.py demo` buys from it with many hands, kills its processes meanwhile, and counts afterwards.
"""

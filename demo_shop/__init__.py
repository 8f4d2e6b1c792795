"""A small shop as an example: four apps that know each other's messages and nothing else of each other.

    orders ── shop.order.placed ──> stock ── stock.reserved ──> payments
      ▲ ▲                           │   ▲                         │  │
      │ └────── shipment.sent ──────┘   └──── payment.received ───┘  │
      └──────────────────────── payment.received ────────────────────┘

Each app has its models, its services (the changes, and the messages about them) and its handlers. `orders` comes first.

Messages with a delay: an SMS 20 minutes after an order and a request for a review after an hour (`notices`), a reminder after
30 minutes if it is not paid, a rating of five stars 48 hours after its shipment unless the customer gave one (`orders`). An
order that is cancelled in time also cancels its messages. A receipt that the mail provider refuses is sent again 10 minutes
later (`notices`). A sale is reported when its payment and its shipment have both arrived (`orders`).

Two more packages are not part of the shop. `banks` is an example of prepared messages, with a second database. `simulation` is
`manage.py demo`: it simulates many customers of both, kills processes, and audits the result.
"""

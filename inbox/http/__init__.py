"""The HTTP API of the inbox: clients in other languages read messages under a lease and acknowledge them.

    # shop/handlers.py                                # urls.py
    from inbox.http import subscribe                  path("api/inbox/", include("inbox.http.urls"))

    subscribe("shop.order.placed", name="erp.orders")

A subscription is a handler without a function: the consumer, or the relay with local://, stores its messages as those of any
handler, and `reading` gives them to clients. States, duplicates, retries, dead letters and order are those of the inbox.

`inbox.http.urls` needs the extra `http` (Django Ninja), and tokens in `INBOX["HTTP"]` or `OUTBOX["HTTP"]`. The rest of the
inbox does not import this package.
"""

from inbox.http.subscribing import subscribe

__all__ = ["subscribe"]

"""Outgoing webhooks: send messages to the HTTP endpoints of other companies, signed, each at its own pace.

    # handlers.py
    from inbox.contrib.outgoing_webhooks import send_webhooks

    send_webhooks("shop.order.placed", "shop.order.shipped")

A message of these topics is handled like any other: in one transaction it becomes one inbox row for each endpoint that wants
it (`fanning_out`). The process `inbox_outgoing_webhooks` (`service`) runs these rows under a lease, without a transaction: it
signs the body and posts it (`delivering`). Retries, dead letters and the trail are those of the inbox. An endpoint is a
handler to the runner, so that endpoints take turns and a slow one occupies only its own share of the threads. An endpoint that
fails repeatedly is paused (`endpoints`).

An optional app: add "inbox.contrib.outgoing_webhooks" to INSTALLED_APPS.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from exactly_once.packages import looked_up

if TYPE_CHECKING:
    from inbox.contrib.outgoing_webhooks.fanning_out import send_webhooks
    from inbox.contrib.outgoing_webhooks.models import Endpoint

__all__ = ["Endpoint", "send_webhooks"]

__getattr__ = partial(looked_up, __name__, {"Endpoint": "models", "send_webhooks": "fanning_out"})

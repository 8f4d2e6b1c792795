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

from importlib import import_module
from typing import TYPE_CHECKING, Any

from django.apps import apps as installed_apps
from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from inbox.contrib.outgoing_webhooks.fanning_out import send_webhooks
    from inbox.contrib.outgoing_webhooks.models import Endpoint

__all__ = ["Endpoint", "send_webhooks"]

_MODULES = {
    "Endpoint": "inbox.contrib.outgoing_webhooks.models",
    "send_webhooks": "inbox.contrib.outgoing_webhooks.fanning_out",
}


def __getattr__(name: str) -> Any:
    # Looked up on first use, because Django imports this package before its models can be.
    if name not in _MODULES:
        raise AttributeError(f"module 'inbox.contrib.outgoing_webhooks' has no attribute {name!r}")
    # Without the app Django would take Endpoint for a model of the app "inbox", and makemigrations would add it there.
    if not installed_apps.is_installed(__name__):
        raise ImproperlyConfigured(f"{__name__}.{name} needs its app: add {__name__!r} to INSTALLED_APPS and run migrate.")
    return getattr(import_module(_MODULES[name]), name)

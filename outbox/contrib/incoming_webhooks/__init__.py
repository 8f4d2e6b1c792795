"""Webhooks of other services: verify the signature, publish the event in one transaction, answer 200 after the commit.

    from outbox.contrib.incoming_webhooks import Stripe, WebhookView

    path("stripe/", WebhookView.as_view(topic="stripe.event", verify=Stripe(settings.STRIPE_SECRET), biz_id="id"))

The package has no table and is not an app: the outbox's own row is the stored event, and its biz-id is the provider's event id.
Nothing else in the outbox imports this package.
"""

from outbox.contrib.incoming_webhooks.signatures import GitHub, InvalidSignature, StandardWebhooks, Stripe
from outbox.contrib.incoming_webhooks.views import Callback, WebhookView, conflicting_event, header

__all__ = [
    "Callback",
    "GitHub",
    "InvalidSignature",
    "StandardWebhooks",
    "Stripe",
    "WebhookView",
    "conflicting_event",
    "header",
]

from django.contrib import admin
from django.urls import path

from demo_shop.payments.services import is_signed
from outbox.contrib.incoming_webhooks import WebhookView

urlpatterns = [
    path("admin/", admin.site.urls),
    path(
        "payments/webhook/",
        WebhookView.as_view(topic="payment.notified", verify=is_signed, biz_id="id"),
        name="payments-webhook",
    ),
]

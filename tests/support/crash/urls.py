"""The webhook of a process that is killed."""

from django.urls import path

from outbox.contrib.incoming_webhooks import StandardWebhooks, WebhookView, header

SECRET = "whsec_c2VjcmV0IG9mIHRoZSBwcm92aWRlcg=="

urlpatterns = [
    path("hook/", WebhookView.as_view(topic="crash.done", verify=StandardWebhooks(SECRET), biz_id=header("webhook-id")))
]

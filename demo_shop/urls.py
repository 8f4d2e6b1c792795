from django.contrib import admin
from django.urls import path

from demo_shop.payments.views import webhook

urlpatterns = [
    path("admin/", admin.site.urls),
    path("payments/webhook/", webhook, name="payments-webhook"),
]

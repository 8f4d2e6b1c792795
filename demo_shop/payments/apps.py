from django.apps import AppConfig


class PaymentsConfig(AppConfig):
    name = "demo_shop.payments"
    label = "payments"

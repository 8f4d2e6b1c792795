from django.apps import AppConfig


class OrdersConfig(AppConfig):
    name = "demo_shop.orders"
    label = "orders"

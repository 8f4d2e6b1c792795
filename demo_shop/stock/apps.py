from django.apps import AppConfig


class StockConfig(AppConfig):
    name = "demo_shop.stock"
    label = "stock"

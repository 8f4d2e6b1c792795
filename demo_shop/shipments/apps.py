from django.apps import AppConfig


class ShipmentsConfig(AppConfig):
    name = "demo_shop.shipments"
    label = "shipments"

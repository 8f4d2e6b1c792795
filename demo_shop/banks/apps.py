from django.apps import AppConfig


class BanksConfig(AppConfig):
    name = "demo_shop.banks"
    label = "banks"

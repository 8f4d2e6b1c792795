from django.apps import AppConfig


class NoticesConfig(AppConfig):
    name = "demo_shop.notices"
    label = "notices"

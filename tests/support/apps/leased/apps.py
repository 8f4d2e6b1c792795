from django.apps import AppConfig


class LeasedConfig(AppConfig):
    name = "tests.support.apps.leased"
    label = "testleased"

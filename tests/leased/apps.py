from django.apps import AppConfig


class LeasedConfig(AppConfig):
    name = "tests.leased"
    label = "testleased"

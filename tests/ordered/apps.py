from django.apps import AppConfig


class OrderedConfig(AppConfig):
    name = "tests.ordered"
    label = "testordered"

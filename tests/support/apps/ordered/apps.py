from django.apps import AppConfig


class OrderedConfig(AppConfig):
    name = "tests.support.apps.ordered"
    label = "testordered"

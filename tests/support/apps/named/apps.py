from django.apps import AppConfig


class NamedConfig(AppConfig):
    name = "tests.support.apps.named"
    label = "testnamed"

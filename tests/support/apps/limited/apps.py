from django.apps import AppConfig


class LimitedConfig(AppConfig):
    name = "tests.support.apps.limited"
    label = "testlimited"

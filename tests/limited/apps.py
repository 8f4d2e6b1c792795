from django.apps import AppConfig


class LimitedConfig(AppConfig):
    name = "tests.limited"
    label = "testlimited"

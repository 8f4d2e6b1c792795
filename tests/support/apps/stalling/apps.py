from django.apps import AppConfig


class StallingConfig(AppConfig):
    name = "tests.support.apps.stalling"

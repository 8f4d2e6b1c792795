from django.apps import AppConfig


class HookedConfig(AppConfig):
    name = "tests.support.apps.hooked"
    label = "testhooked"

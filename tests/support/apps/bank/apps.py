from django.apps import AppConfig


class BankConfig(AppConfig):
    name = "tests.support.apps.bank"

from django.apps import AppConfig


class NewcomerConfig(AppConfig):
    name = "tests.support.apps.newcomer"
    label = "testnewcomer"

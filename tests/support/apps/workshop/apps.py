from django.apps import AppConfig


class WorkshopConfig(AppConfig):
    name = "tests.support.apps.workshop"
    label = "testworkshop"

from django.apps import AppConfig


class WorkshopConfig(AppConfig):
    name = "tests.workshop"
    label = "testworkshop"

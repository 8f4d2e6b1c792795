from django.apps import AppConfig


class JoinedConfig(AppConfig):
    name = "tests.support.apps.joined"
    label = "testjoined"

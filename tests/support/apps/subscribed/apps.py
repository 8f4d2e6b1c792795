from django.apps import AppConfig


class SubscribedConfig(AppConfig):
    name = "tests.support.apps.subscribed"
    label = "testsubscribed"

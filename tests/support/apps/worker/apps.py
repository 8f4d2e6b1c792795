from django.apps import AppConfig


class WorkerConfig(AppConfig):
    name = "tests.support.apps.worker"
    label = "testworker"

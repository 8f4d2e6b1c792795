from django.apps import AppConfig


class WorkerConfig(AppConfig):
    name = "tests.worker"
    label = "testworker"

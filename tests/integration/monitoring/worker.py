"""A Celery worker that counts for Prometheus as the docs say: `celery -A tests.integration.monitoring.worker worker`."""

from celery.signals import worker_init

from exactly_once.telemetry.prometheus import attach
from tests.integration.celery.handling.worker import app

__all__ = ["app"]

worker_init.connect(lambda **_arguments: attach(), weak=False)

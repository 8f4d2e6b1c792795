"""The app of a worker's process: `celery -A tests.integration.celery.handling.worker worker`."""

import json
import os

import django

django.setup()

from tests.integration.celery.handling.project import make_app  # noqa: E402 - its tasks use models

app = make_app(os.environ["CELERY_BROKER"], os.environ["CELERY_RESULTS"], **json.loads(os.environ["CELERY_SETTINGS"]))

"""The app of a worker's process: `celery -A tests.integration.celery.publishing.worker worker`."""

import json
import os

import django

django.setup()

from tests.integration.celery.publishing.project import make_app  # noqa: E402 - its tasks use models

app = make_app(os.environ["CELERY_BROKER"], os.environ["CELERY_RESULTS"], **json.loads(os.environ.get("CELERY_SETTINGS", "{}")))

"""Django settings of every process of the benchmark `tasks`, ours too; TASKS_SIDE says which backend it has."""

from __future__ import annotations

import os

from benchmarks.peers.driving import database

SIDE = os.environ["TASKS_SIDE"]
APPS = {
    "django-exactly-once": ["exactly_once", "outbox", "inbox", "inbox.contrib.tasks", "django_tasks"],
    "django-tasks-db": ["django_tasks", "django_tasks_db"],
    "django-ox": ["django_tasks", "django_ox"],
    "procrastinate": ["procrastinate.contrib.django"],
}
BACKENDS = {
    "django-exactly-once": "inbox.tasks.ExactlyOnceBackend",
    "django-tasks-db": "django_tasks_db.DatabaseBackend",
    "django-ox": "django_ox.backend.OxBackend",
}

SECRET_KEY = "benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = APPS[SIDE]
# With Django's default, peers would connect for every task.
DATABASES = {"default": database() | {"CONN_MAX_AGE": None}}
OUTBOX = {"BROKER_URL": "local://", "SOURCE": "/benchmarks"}
INBOX = {"GROUP": "benchmarks"}
PROCRASTINATE_IMPORT_PATHS = ["benchmarks.peers.task_effects"]
if SIDE in BACKENDS:
    TASKS = {"default": {"BACKEND": BACKENDS[SIDE], "QUEUES": ["default"]}}

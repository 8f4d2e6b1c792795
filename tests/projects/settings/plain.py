"""Django's own backend for PostgreSQL, with psycopg 3"""

import os

import dj_database_url

from tests.settings import TEMPLATES  # noqa: F401 - it is one of these settings

SECRET_KEY = "projects"
USE_TZ = True
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.projects.urls"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "exactly_once",
    "outbox",
    "outbox.contrib.sql",
    "inbox",
    "inbox.contrib.joins",
    "tests.projects.shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}  # Django 6.1 warns if it is missing
OUTBOX = INBOX = {"BROKER_URL": os.environ.get("BROKER_URL", "local://")}
DATABASES = {"default": {**dj_database_url.parse(os.environ["DATABASE_URL"])}}

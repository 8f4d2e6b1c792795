"""Django settings of the test suite, and of the processes the tests start.

DATABASE_URL and OTHER_DATABASE_URL say which databases; tests/databases.py sets them for a test run, and the
`process_environment` fixture for a process that must see the same data. Without them (mypy, makemigrations) nothing is
ever stored.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dj_database_url

NOWHERE = "sqlite://:memory:"

SQLITE_OPTIONS = {
    "transaction_mode": "IMMEDIATE",  # a transaction that reads first and writes later cannot be refused half-way
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}


def database(url: str) -> dict[str, Any]:
    settings: dict[str, Any] = {**dj_database_url.parse(url)}
    name = str(settings["NAME"])
    if settings["ENGINE"] == "django.db.backends.sqlite3":
        settings["OPTIONS"] = SQLITE_OPTIONS
        if name != ":memory:":
            # A file, because threads and processes have to share it.
            settings["TEST"] = {"NAME": str(Path(name).with_name(f"test-{Path(name).name}"))}
    else:
        # Two runs may share one server.
        settings["TEST"] = {"NAME": f"test_{name}_{os.getpid()}"}
    return settings


def beside(url: str, name: str) -> str:
    """The URL of another database on the same server."""
    return url if url == NOWHERE else f"{url.rpartition('/')[0]}/{name}"


def databases() -> dict[str, dict[str, Any]]:
    """Those that the environment names at present."""
    default = os.environ.get("DATABASE_URL", NOWHERE)
    return {"default": database(default), "other": database(os.environ.get("OTHER_DATABASE_URL", beside(default, "other")))}


DATABASES = databases()
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.admin",
    "django.contrib.staticfiles",
    "exactly_once",
    "exactly_once.contrib.views",
    "outbox",
    "outbox.contrib.sql",
    "inbox",
    "outbox.contrib.recurring",
    "inbox.contrib.joins",
    "inbox.contrib.outgoing_webhooks",
    "inbox.contrib.tasks",
    "tests.support.apps.effects",
]
MIDDLEWARE = [
    "tests.support.content_policy.strict_content_security_policy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ROOT_URLCONF = "tests.urls"
SECRET_KEY = "tests"
MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}  # Django 6.1 warns if it is missing
STATIC_URL = "static/"
USE_TZ = True

OUTBOX: dict[str, Any] = {}
INBOX: dict[str, Any] = {}

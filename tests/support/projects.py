"""Django projects that a test writes into a directory, and runs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.processes import start_python

ADMIN_SETTINGS = """\
from tests.settings import MIDDLEWARE, STATIC_URL, TEMPLATES

ADMIN_APPS = [
    *("django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes"),
    *("django.contrib.messages", "django.contrib.sessions", "django.contrib.staticfiles"),
]
"""
"""Settings that Django's admin needs, without INSTALLED_APPS."""
ADMIN_URLS = """\
from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
"""


SQLITE = {
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": "db.sqlite3",
    "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
}


def settings_of(*apps: str, database: dict[str, Any] = SQLITE, **others: Any) -> str:
    """The text of the settings of a project with these apps beside `exactly_once`, on SQLite or on another database."""
    values = {
        "SECRET_KEY": "x",
        "USE_TZ": True,
        "DEFAULT_AUTO_FIELD": "django.db.models.BigAutoField",
        "INSTALLED_APPS": ["exactly_once", *apps],
        "DATABASES": {"default": database},
    }
    return "".join(f"{name} = {value!r}\n" for name, value in {**values, **others}.items())


def run_in(directory, settings, *arguments, **environment):
    """Run Python with these arguments in `directory`, with its modules and ours; what it prints is `stdout`."""
    environment = environment_in(directory, settings, **environment)
    with tempfile.TemporaryFile() as output:
        process = start_python([*arguments], environment=environment, output=output.fileno(), directory=directory)
        try:
            status = process.wait(100)
        finally:
            process.kill()
        output.seek(0)
        return subprocess.CompletedProcess(arguments, status, output.read().decode())


def environment_in(directory: Path, settings: str, **environment: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join([str(directory), str(ROOT)])
    return {**inherited, "PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": settings, **environment}

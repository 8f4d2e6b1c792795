"""Django projects that a test writes into a directory, and runs in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from tests.support import ROOT
from tests.support.processes import start_python

ADMIN_SETTINGS = """\
ADMIN_APPS = [
    *("django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes"),
    *("django.contrib.messages", "django.contrib.sessions", "django.contrib.staticfiles"),
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
PROCESSORS = [
    "django.template.context_processors.request",
    "django.contrib.auth.context_processors.auth",
    "django.contrib.messages.context_processors.messages",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": PROCESSORS},
    }
]
STATIC_URL = "static/"
"""
"""Settings that Django's admin needs, without INSTALLED_APPS."""
SHOP_SETTINGS = f"""\
{ADMIN_SETTINGS}
SECRET_KEY = "x"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ALLOWED_HOSTS = ["testserver"]
ROOT_URLCONF = "shop.urls"
"""
"""The same, for a project of the package `shop`."""
SHOP_HANDLERS = """\
from inbox import Reject, idempotent_handler


@idempotent_handler("shop.order.placed")
def handle(message):
    if message.payload["order"] == "bad":
        raise Reject("it is bad")
"""
ADMIN_URLS = """\
from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
"""


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


def titled_blocks(page: str) -> dict[str, str]:
    """The Python files of a page, by name; blocks of one title follow each other in one file."""
    files: dict[str, str] = {}
    written = (ROOT / "docs" / page).read_text()
    for name, text in re.findall(r'^```python title="([\w/]+\.py)"\n(.*?)^```$', written, re.MULTILINE | re.DOTALL):
        files[name] = files.get(name, "") + text
    return files

"""Django projects that a test writes into a directory, and runs in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

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
USE_SHOP = """
import json
from io import StringIO

import django
django.setup()
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import transaction
from django.test import Client

from inbox.models import InboxMessage
from outbox import publish
from outbox.models import OutboxMessage

client = Client()


def said(*command):
    out = StringIO()
    call_command(*command, stdout=out)
    return out.getvalue()


def visited(path, data=None):
    response = client.get(path) if data is None else client.post(path, data, follow=True)
    assert response.status_code == 200, (path, response.status_code)
    return response.text


def use(using, prefix=""):
    for order in ("good", "bad", "later"):
        with transaction.atomic(using=using):
            publish("shop.order.placed", {"order": order}, biz_id=order, delay="2m" if order == "later" else None)
    call_command("outbox_relay", drain=True, verbosity=0)
    assert {row.biz_id: row.state for row in InboxMessage.objects.all()} == {"good": "done", "bad": "dead"}

    assert "Group 'Exactly once viewer' created" in said("exactly_once_roles")
    assert json.loads(said("exactly_once_status", "--json")).keys() == {"outbox", "inbox"}
    assert "it is bad" in said("exactly_once_trail", "--topic", "shop.order.placed", "--biz-id", "bad")
    said("outbox_pause", "shop.order.placed", "--reason", "try"), said("outbox_resume", "shop.order.placed")
    said("exactly_once_purge"), said("inbox_retry", "--all", "--dry-run"), said("outbox_resume", "--checks")

    client.force_login(User.objects.create_superuser("operator"))
    labels = {"exactly_once", f"{prefix}outbox", f"{prefix}inbox"}
    pages = [model._meta for model in admin.site._registry if model._meta.app_label in labels]
    for opts in pages:
        text = visited(f"/admin/{opts.app_label}/{opts.model_name}/")
        assert 'href="/static/exactly_once/admin.css"' in text, opts
    assert len(pages) > 12
    for model in (OutboxMessage, InboxMessage):
        opts, pk = model._meta, model.objects.get(biz_id="bad").pk
        assert "message-life" in visited(f"/admin/{opts.app_label}/{opts.model_name}/{pk}/change/"), opts
"""
"""A program that defines `use`: messages, commands and pages in a project with `SHOP_HANDLERS`."""
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


def titled_blocks(page: str) -> dict[str, str]:
    """The Python files of a page, by name; blocks of one title follow each other in one file."""
    files: dict[str, str] = {}
    written = (ROOT / "docs" / page).read_text()
    for name, text in re.findall(r'^```python title="([\w/]+\.py)"\n(.*?)^```$', written, re.MULTILINE | re.DOTALL):
        files[name] = files.get(name, "") + text
    return files

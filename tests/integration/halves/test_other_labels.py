"""A project whose own apps are labelled outbox and inbox installs ours under other labels, as the documentation shows.

The whole cycle under other labels is a project of `tests/projects`.
"""

import dj_database_url
import pytest
from django.db import connection

from tests.support import ROOT
from tests.support.pages import titled_files
from tests.support.projects import ADMIN_SETTINGS, ADMIN_URLS, SQLITE, run_in, settings_of

PAGE = ROOT / "docs" / "how-to" / "app-named-outbox.md"
THEIR_MODELS = """\
from django.db import models


class {name}(models.Model):
    body = models.TextField()
"""
HANDLERS = """\
from inbox import idempotent_handler

idempotent_handler("shop.order.placed", name="shop.handle")(print)
"""
USE = """
from django.apps import apps
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection, transaction
from django.test import Client

from exactly_once.models import AuditEntry
from inbox.models import InboxMessage
from outbox import publish
from outbox.models import OutboxMessage

call_command("makemigrations", "outbox", "inbox", verbosity=0)
call_command("makemigrations", check=True)
call_command("migrate", verbosity=0)
call_command("check", databases=["default"])
with transaction.atomic():
    publish("shop.order.placed", {}, biz_id="now")
    publish("shop.order.placed", {}, biz_id="later", delay="2m")
call_command("outbox_relay", drain=True, verbosity=0)
assert InboxMessage.objects.get(biz_id="now").state == "done"
tables = {*connection.introspection.table_names()}
assert {"message_outbox_outboxmessage", "message_inbox_inboxmessage", "outbox_outboxmessage", "inbox_inboxmessage"} <= tables
theirs = [apps.get_model("outbox.OutboxMessage"), apps.get_model("inbox.InboxMessage")]
assert [model.objects.count() for model in theirs] == [0, 0]

user = User.objects.create_user("staff", is_staff=True)
labels = ["exactly_once", "message_outbox", "message_inbox"]
user.user_permissions.set(Permission.objects.filter(content_type__app_label__in=labels))
client = Client()
client.force_login(user)
rows = {row.biz_id: row for row in OutboxMessage.objects.all()}
page = client.get(f"/admin/message_outbox/outboxmessage/{rows['now'].pk}/change/").text
assert "message-life" in page and "/admin/message_inbox/inboxmessage/?q=" in page
chosen = {"action": "cancel", "_selected_action": rows["later"].pk, "confirmed": "yes", "reason": "try"}
client.post("/admin/message_outbox/outboxmessage/", chosen)
assert OutboxMessage.objects.get(biz_id="later").state == "cancelled"
assert AuditEntry.objects.filter(action="cancel", actor="staff").exists()
"""


@pytest.fixture
def project(tmp_path, request):
    """The files of the page, and two apps of the project with our labels and the names of our models."""
    apps = ["shop.outbox", "shop.inbox", "shop.orders"]
    database = SQLITE
    if connection.vendor == "postgresql":
        database = dj_database_url.parse(request.getfixturevalue("postgres_server").create_database())
    given = {"database": database, "ALLOWED_HOSTS": ["testserver"], "ROOT_URLCONF": "shop.urls"}
    files = {
        "shop/__init__.py": "",
        "shop/urls.py": ADMIN_URLS,
        "shop/settings.py": settings_of(INSTALLED_APPS=apps, **given) + ADMIN_SETTINGS + "INSTALLED_APPS += ADMIN_APPS\n",
        "shop/outbox/models.py": THEIR_MODELS.format(name="OutboxMessage"),
        "shop/inbox/models.py": THEIR_MODELS.format(name="InboxMessage"),
        "shop/orders/handlers.py": HANDLERS,
        **{f"shop/{app}/__init__.py": "" for app in ("outbox", "inbox", "orders")},
    }
    for name, text in titled_files(PAGE, given=files).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(project, script=""):
    return run_in(project, "shop.settings", "-c", f"import django\ndjango.setup()\n{script}", PYTHONWARNINGS="error")


@pytest.mark.every_database
def test_apps_work_under_other_labels_beside_apps_labelled_outbox_and_inbox(project):
    done = run(project, USE)

    assert done.returncode == 0, done.stdout
    assert "No changes detected" in done.stdout


@pytest.mark.every_database
def test_under_its_own_label_the_clash_is_the_error_that_the_page_shows(project):
    settings = project / "shop" / "settings.py"
    settings.write_text(settings.read_text() + "INSTALLED_APPS += ['outbox']\n")

    done = run(project)

    assert "Application labels aren't unique, duplicates: outbox" in done.stdout

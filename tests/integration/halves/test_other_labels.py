"""A project whose own apps are labelled outbox and inbox installs ours under other labels, as the documentation shows."""

import pytest

from tests.support import ROOT
from tests.support.pages import titled_files
from tests.support.projects import ADMIN_URLS, SHOP_HANDLERS, SHOP_SETTINGS, USE_SHOP, run_in

PAGE = ROOT / "docs" / "how-to" / "app-named-outbox.md"
SETTINGS = f"""\
{SHOP_SETTINGS}
INSTALLED_APPS = [*ADMIN_APPS, "shop.outbox", "shop.inbox", "shop.orders"]
"""
THEIR_MODELS = """\
from django.db import models


class {name}(models.Model):
    body = models.TextField()
"""


USE = f"""{USE_SHOP}
from django.apps import apps
from django.contrib.auth.models import Permission
from django.db import connection

from exactly_once.models import AuditEntry

call_command("makemigrations", "outbox", "inbox", verbosity=0)
call_command("makemigrations", check=True)
call_command("migrate", verbosity=0)
call_command("check", databases=["default"])
use("default", "message_")
tables = {{*connection.introspection.table_names()}}
assert {{"message_outbox_outboxmessage", "message_inbox_inboxmessage", "outbox_outboxmessage", "inbox_inboxmessage"}} <= tables
theirs = [apps.get_model("outbox.OutboxMessage"), apps.get_model("inbox.InboxMessage")]
assert [model.objects.count() for model in theirs] == [0, 0]

user = User.objects.create_user("staff", is_staff=True)
labels = ["exactly_once", "message_outbox", "message_inbox"]
user.user_permissions.set(Permission.objects.filter(content_type__app_label__in=labels))
client.force_login(user)
visited("/admin/exactly_once/overview/figures/?charts=hour")
row, bad = (OutboxMessage.objects.get(biz_id=name) for name in ("later", "bad"))
page = visited(f"/admin/message_outbox/outboxmessage/{{row.pk}}/change/")
assert "message-life" in page
assert "/admin/message_inbox/inboxmessage/?q=" in visited(f"/admin/message_outbox/outboxmessage/{{bad.pk}}/change/")
chosen = {{"action": "cancel", "_selected_action": row.pk}}
assert "No, take me back" in visited("/admin/message_outbox/outboxmessage/", chosen)
visited("/admin/message_outbox/outboxmessage/", {{**chosen, "confirmed": "yes", "reason": "try"}})
assert OutboxMessage.objects.get(biz_id="later").state == "cancelled"
assert AuditEntry.objects.filter(action="cancel", actor="staff").exists()
"""


@pytest.fixture
def project(tmp_path, empty_database):
    """The files of the page, and two apps of the project with our labels and the names of our models."""
    files = {
        "shop/__init__.py": "",
        "shop/urls.py": ADMIN_URLS,
        "shop/settings.py": SETTINGS + f"DATABASES = {{'default': {empty_database('shop.sqlite3')!r}}}\n",
        "shop/outbox/models.py": THEIR_MODELS.format(name="OutboxMessage"),
        "shop/inbox/models.py": THEIR_MODELS.format(name="InboxMessage"),
        "shop/orders/handlers.py": SHOP_HANDLERS,
        **{f"shop/{app}/__init__.py": "" for app in ("outbox", "inbox", "orders")},
    }
    for name, text in titled_files(PAGE, given=files).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(project, *scripts):
    program = "import django\ndjango.setup()\n" + "".join(scripts)
    return run_in(project, "shop.settings", "-c", program, PYTHONWARNINGS="error")


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

"""Projects whose database routers decide where our tables are: without a default database, and with one for other apps."""

import pytest

from tests.support.projects import ADMIN_URLS, SHOP_HANDLERS, SHOP_SETTINGS, USE_SHOP, run_in

SETTINGS = f"""\
{SHOP_SETTINGS}
INSTALLED_APPS = [
    *ADMIN_APPS, "exactly_once", "outbox", "inbox", "inbox.contrib.joins", "inbox.contrib.outgoing_webhooks", "shop",
]
DATABASE_ROUTERS = ["shop.router.Router"]
"""
ROUTER = """\
class Router:
    def db_for_read(self, model, **hints):
        return "main"

    db_for_write = db_for_read

    def allow_migrate(self, db, app_label, **hints):
        return db == "main"
"""
USE = f"""{USE_SHOP}
import inbox
from outbox import Draft, cancel, pause, publish_many, resume

call_command("migrate", verbosity=0, database="main")
call_command("check", databases=["main"])
use("main")
with transaction.atomic(using="main"):
    publish_many([Draft("shop.order.placed", {{"order": "another"}})])
    later = publish("shop.order.placed", {{"order": "later"}}, delay="2m")
assert cancel(later.id)
pause("shop.order.placed"), resume("shop.order.placed")
inbox.pause("shop.handle"), inbox.resume("shop.handle")
try:
    said("exactly_once_health", "--ready", "--json")
except SystemExit:
    pass  # no relay is running
"""
MIGRATE = """
import django
django.setup()
from django.core.management import call_command
from django.db import connections
call_command("migrate", verbosity=0, database="other")
assert not [name for name in connections["other"].introspection.table_names() if name.startswith(("inbox", "outbox"))]
call_command("migrate", verbosity=0, database="main")
assert "inbox_inboxmessage" in connections["main"].introspection.table_names()
"""


@pytest.fixture
def project(tmp_path, empty_database):
    """A function that writes a project with these aliases, each with an empty database, and runs a program in it."""

    def run(program, *aliases):
        databases = {"default": {}, **{alias: empty_database(alias) for alias in aliases}}
        files = {
            "__init__.py": "",
            "urls.py": ADMIN_URLS,
            "router.py": ROUTER,
            "handlers.py": SHOP_HANDLERS,
            "settings.py": f"{SETTINGS}DATABASES = {databases!r}\n",
        }
        (tmp_path / "shop").mkdir()
        for name, text in files.items():
            (tmp_path / "shop" / name).write_text(text)
        return run_in(tmp_path, "shop.settings", "-c", program, PYTHONWARNINGS="error")

    return run


@pytest.mark.every_database
def test_without_a_default_database_everything_is_where_the_routers_say(project):
    done = project(USE, "main")

    assert done.returncode == 0, done.stdout


@pytest.mark.every_database
def test_database_that_a_router_keeps_our_apps_off_is_migrated_without_them(project):
    done = project(MIGRATE, "main", "other")

    assert done.returncode == 0, done.stdout

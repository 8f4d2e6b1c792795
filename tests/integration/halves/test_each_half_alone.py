"""Each half alone, in a real project: with the other one not in INSTALLED_APPS it migrates, works and meets real RabbitMQ."""

import json
import sqlite3
from contextlib import closing
from functools import partial

import dj_database_url
import psycopg
import pytest

from inbox.handlers.handler import Handler
from tests.support.projects import ADMIN_SETTINGS, ADMIN_URLS, SQLITE, environment_in, run_in, settings_of
from tests.support.relaying import Queue
from tests.support.waiting import wait_until
from tests.support.workers import GROUP, Process, broker_options, length_of, send

TOPIC = "shop.order.placed"
SHIP = "shop.ship"


WITH_ADMIN = f"""
{ADMIN_SETTINGS}
INSTALLED_APPS += ADMIN_APPS
ALLOWED_HOSTS = ["testserver"]
ROOT_URLCONF = "project_urls"
"""
INSERTED = {
    "outbox": """
from django.db import transaction
from outbox import publish
with transaction.atomic():
    publish('shop.order.placed', {})
""",
    "inbox": """
from django.utils.timezone import now
from inbox.store import receipts
names = dict(handler='shop.ship', topic='shop.order.placed', biz_id='17', message_id='17')
receipts.create('default', **names, state='dead', body=b'{}', headers={}, received_at=now())
""",
}
VISIT = """
from django.contrib.auth.models import User
from django.contrib.staticfiles import finders
from django.test import Client

client = Client()
client.force_login(User.objects.create_superuser("operator"))


def visit(page, data=None, app=half):
    url = f"/admin/{app}/{page}"
    response = client.get(url) if data is None else client.post(url, data)
    assert response.status_code == 200, (url, response.status_code)
    assert f'href="/static/exactly_once/admin.css"' in response.text, url
    return response.text


assert "message-empty" not in visit(f"{half}message/")
assert "message-life" in visit(f"{half}message/1/change/")
assert "No, take me back" in visit(f"{half}message/", {"action": action, "_selected_action": 1})
assert "is shown as silent" in visit("process/", app="exactly_once")
assert f'aria-labelledby="overview-{half}"' in visit("overview/", app="exactly_once")
assert "Vacuum horizon of the database" in visit("databasehealth/", app="exactly_once")
assert finders.find("exactly_once/admin.css")
assert finders.find("exactly_once/uplot/uPlot.iife.min.js")
"""
MODELS = """\
from django.db import models


class Order(models.Model):
    name = models.CharField(max_length=100)

    class Meta:
        app_label = "shop"
"""
BUY = f"""\
from django.db import transaction
from outbox import publish
from shop.models import Order


class Changed(Exception):
    pass


def buy(name):
    Order.objects.create(name=name)
    publish({TOPIC!r}, {{"order": name}}, biz_id=name)


with transaction.atomic():
    buy("order-17")
try:
    with transaction.atomic():
        buy("order-18")
        raise Changed
except Changed:
    pass
"""
HANDLERS = f"""\
from inbox import idempotent_handler
from shop.models import Order


@idempotent_handler({TOPIC!r}, name={SHIP!r})
def ship(message):
    Order.objects.create(name=message.payload["order"])
"""
TESTS = f"""\
from datetime import timedelta

from django.test import TestCase
from inbox.testing import assert_duplicate, deliver, drain, make_message, run_handler, travel
from shop.handlers import ship
from shop.models import Order


class ShipTest(TestCase):
    def test_order_is_shipped_once(self):
        deliver(make_message({TOPIC!r}, {{"order": "17"}}), times=2)

        assert_duplicate({TOPIC!r}, payload__order="17")
        self.assertEqual(Order.objects.count(), 1)

    def test_retry_is_due_later(self):
        deliver(make_message({TOPIC!r}, {{}}), raise_errors=False)
        travel(timedelta(minutes=1))
        with self.assertRaises(KeyError):
            drain()

    def test_handler_is_called(self):
        run_handler(ship, {{"order": "17"}})

        self.assertEqual(Order.objects.get().name, "17")
"""


class Project:
    """A Django project with one half and an app of its own, `shop`; each command is a process of its own.

    Args:
        url: of its database on PostgreSQL; by default it has a SQLite file.
    """

    def __init__(self, directory, half, *, url=None, **given):
        self._directory = directory
        self._connect = partial(psycopg.connect, url) if url else partial(sqlite3.connect, directory / "db.sqlite3")
        database = dj_database_url.parse(url) if url else {**SQLITE, "NAME": str(directory / "db.sqlite3")}
        shop = directory / "shop"
        shop.mkdir()
        (shop / "__init__.py").touch()
        (shop / "models.py").write_text(MODELS)
        (shop / "handlers.py").write_text(HANDLERS if half == "inbox" else "")
        # Not below `tests`: each command runs in a fresh interpreter, see `tests.support.processes.start`.
        (directory / "project_settings.py").write_text(settings_of(half, "shop", database=database, **{half.upper(): given}))

    def manage(self, *arguments):
        done = run_in(self._directory, "project_settings", "-m", "django", *arguments, PYTHONWARNINGS="error")
        assert done.returncode == 0, done.stdout
        return done.stdout

    def prepare(self):
        self.manage("migrate", "--run-syncdb", "--verbosity", "0")
        self.manage("check", "--fail-level", "WARNING", "--database", "default")
        self.manage("makemigrations", "--check", "--dry-run")

    def with_admin(self):
        with (self._directory / "project_settings.py").open("a") as settings:
            settings.write(WITH_ADMIN)
        (self._directory / "project_urls.py").write_text(ADMIN_URLS)

    def process(self, command):
        environment = environment_in(self._directory, "project_settings", PYTHONWARNINGS="error")
        return Process(environment, self._directory / f"{command}.log", command)

    def rows(self, statement):
        with closing(self._connect()) as database:
            return database.execute(statement).fetchall()


@pytest.fixture
def outbox_project(tmp_path, rabbitmq_url, postgres_server):
    return Project(tmp_path, "outbox", url=postgres_server.create_database(), BROKER_URL=rabbitmq_url)


@pytest.fixture
def inbox_project(tmp_path, rabbitmq_url):
    return Project(tmp_path, "inbox", BROKER_URL=rabbitmq_url, GROUP=GROUP)


def test_the_outbox_alone_publishes_in_a_transaction_and_relays_to_rabbitmq(outbox_project, rabbitmq_url):
    project = outbox_project
    project.prepare()

    with Queue(rabbitmq_url, TOPIC) as queue, project.process("outbox_relay") as relay:
        project.manage("shell", "--verbosity", "0", "--command", BUY)
        [arrived] = queue.take(1)
        relay.until(lambda: project.rows("SELECT state FROM outbox_outboxmessage") == [("published",)])
        assert relay.end() == 0, relay.said()
        assert queue.take_all() == [], "what was rolled back is not sent"

    assert json.loads(arrived.body) == {"order": "order-17"}
    sent = (arrived.properties["message_id"], "order-17")
    assert project.rows("SELECT message_id::text, biz_id FROM outbox_outboxmessage") == [sent]
    assert project.rows("SELECT name FROM shop_order") == [("order-17",)]
    assert project.rows("SELECT FROM pg_tables WHERE tablename LIKE 'outbox%'")
    assert not project.rows("SELECT FROM pg_tables WHERE tablename LIKE 'inbox%'")


def test_the_inbox_alone_handles_a_foreign_producers_message_once_although_it_is_delivered_twice(
    inbox_project, rabbitmq_server, rabbitmq_url
):
    project = inbox_project
    of_the_shop = Handler(name=SHIP, topics=(TOPIC,), function=print, biz_id=None, using="default")
    options = broker_options(rabbitmq_url)
    project.prepare()

    with project.process("inbox_consume") as consumer:
        consumer.until(lambda: "consumer: receiving from" in consumer.said())
        for _ in range(2):
            send(rabbitmq_url, TOPIC, {"order": "order-17"}, message_id="17")
        consumer.until(lambda: project.rows("SELECT duplicates FROM inbox_inboxmessage") == [(1,)])
        wait_until(lambda: length_of(rabbitmq_server, of_the_shop, options) == 0)
        assert consumer.end() == 0, consumer.said()

    assert project.rows("SELECT name FROM shop_order") == [("order-17",)]
    assert project.rows("SELECT state, message_id, duplicates FROM inbox_inboxmessage") == [("done", "17", 1)]
    assert not project.rows("SELECT name FROM sqlite_master WHERE name LIKE 'outbox%'")


@pytest.mark.long
@pytest.mark.parametrize(("half", "action"), [("outbox", "cancel"), ("inbox", "skip")])
def test_admin_of_each_half_alone_finds_its_templates_and_its_style_sheet(half, action, tmp_path):
    project = Project(tmp_path, half)
    project.with_admin()
    project.manage("migrate", "--run-syncdb", "--verbosity", "0")

    names = f"half, action = {half!r}, {action!r}\n"
    project.manage("shell", "--verbosity", "0", "--command", INSERTED[half] + names + VISIT)


def test_helpers_for_tests_of_handlers_work_without_the_outbox(tmp_path):
    project = Project(tmp_path, "inbox", BROKER_URL="amqp://localhost//")
    (tmp_path / "shop" / "tests.py").write_text(TESTS)

    assert "Ran 3 tests" in project.manage("test", "shop")


MISSING = "import sys\nsys.modules.update(dict.fromkeys(['fcntl', 'grp', 'pwd', 'resource', 'termios', 'tty']))\n"


USE = """
import django
django.setup()
from django.core.management import call_command
from django.db import transaction
from inbox import idempotent_handler
from outbox import publish
from outbox.models import OutboxMessage

call_command("migrate", verbosity=0)
with transaction.atomic():
    publish("shop.order.placed", {})
assert OutboxMessage.objects.get().state == "ready"
call_command("exactly_once_status")
"""
COMMAND = "from django.core.management import execute_from_command_line\nexecute_from_command_line(['manage.py', {!r}])\n"


def test_web_side_works_and_a_process_refuses_in_one_line(tmp_path):
    (tmp_path / "settings_of_shop.py").write_text(
        settings_of("outbox", "inbox", "django.contrib.contenttypes", "django.contrib.auth")
    )

    used = run_in(tmp_path, "settings_of_shop", "-c", MISSING + USE)
    relayed, consumed = (
        run_in(tmp_path, "settings_of_shop", "-c", MISSING + COMMAND.format(name)) for name in ("outbox_relay", "inbox_consume")
    )

    assert used.returncode == 0, used.stdout
    for refused in (relayed, consumed):
        assert refused.returncode == 1
        assert len(refused.stdout.splitlines()) == 1, refused.stdout
        assert "needs fcntl" in refused.stdout

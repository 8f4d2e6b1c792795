"""The tutorial works word for word: in an empty directory, from a built wheel, on real servers."""

import socket

import pytest

from tests.support import ROOT
from tests.support.pages import blocks_of, titled_files
from tests.support.waiting import A_WHILE, wait_until

pytestmark = pytest.mark.timeout(900)

DOCS = ROOT / "docs"
WEB, POSTGRES, RABBITMQ = 8000, 5432, 5672
SETTINGS = """
INSTALLED_APPS += ["orders"]
DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
"""
CREATE = "from orders.models import Stock; Stock.objects.create(sku='pen', available=10)"
ORDER = "from orders.services import place_order; place_order('1', 'pen')"
LEFT = "from orders.models import Stock; print(Stock.objects.get(sku='pen').available)"


def test_first_hour(reader_of, postgres_environment, postgres_server, rabbitmq_port, web_port, browser):
    ports = {WEB: web_port, POSTGRES: postgres_server.port, RABBITMQ: rabbitmq_port}
    reader = reader_of(postgres_environment, ports)
    operator = Operator(browser, web_port)

    reader.follow(DOCS / "getting-started.md")
    reader.follow(
        DOCS / "tutorial" / "dead-letter.md",
        by_hand={
            "exactly_once_trail --topic": operator.find,
            "available=5": operator.see,
            "sku='pencil').available": operator.retry,
        },
    )
    reader.follow(DOCS / "tutorial" / "postgresql.md")
    reader.follow(DOCS / "tutorial" / "rabbitmq.md")
    reader.follow(DOCS / "tutorial" / "celery.md")

    _orders_are_still_published(reader)
    _sqlite_options_are_reported(reader)


class Operator:
    """Does by hand what the page on dead letters says."""

    def __init__(self, browser, port):
        self._page = browser.new_page()
        self._page.set_default_timeout(1000 * A_WHILE)
        self._port = port

    def find(self):
        page = self._page
        wait_until(lambda: answers(self._port))
        page.goto(f"http://127.0.0.1:{self._port}/admin/")
        page.get_by_label("Username").fill("admin")
        page.get_by_label("Password").fill("secret")
        page.get_by_role("button", name="Log in").click()
        page.locator(".app-exactly_once").get_by_role("link", name="Overview").first.click()
        page.get_by_role("link", name="1 message is a dead letter.").click()
        page.locator("#result_list .field-summary a").click()
        page.get_by_text("orders.reserve_stock").first.wait_for()

    def see(self):
        assert self._page.get_by_text("the shop does not have pencil").first.is_visible()

    def retry(self):
        self._page.get_by_role("button", name="Retry now").click()
        self._page.locator(".messagelist .success").wait_for()


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def _orders_are_still_published(reader):
    """The page on Celery adds a task to the function that publishes, and removes nothing from it."""
    reader.run("python manage.py outbox_relay --drain")

    said = "\n".join(reader.run("python manage.py exactly_once_trail --topic shop.order.placed --biz-id order-4001"))

    assert "published" in said.lower(), said


def _sqlite_options_are_reported(reader):
    """A reader who changes ENGINE and NAME only, and leaves the OPTIONS."""
    reader.run('cp shop/settings.py kept.py; echo \'DATABASES["default"]["OPTIONS"] = {"timeout": 20}\' >> shop/settings.py')

    said = "\n".join(reader.run("python manage.py check 2>&1 || true"))

    assert "exactly_once.E002" in said
    assert "Remove them" in said


def test_existing_project_and_readme(reader_of, environment, web_port):
    """Two projects in one virtual environment, since both pages install the same."""
    founder = reader_of(environment, {})
    founder.run("python3 -m venv .venv\n.venv/bin/pip install --quiet django")
    environment = {**environment, "PATH": f"{founder.directory / '.venv' / 'bin'}:{environment['PATH']}"}

    in_a_project(reader_of, environment, "mysite", {WEB: web_port}).follow(DOCS / "tutorial" / "existing-project.md")

    models = titled_files(DOCS / "getting-started.md")["orders/models.py"]
    reader = in_a_project(reader_of, environment, "shop")
    directory = reader.directory
    reader.run("python manage.py startapp orders")
    (directory / "orders" / "models.py").write_text(models)
    with (directory / "shop" / "settings.py").open("a") as settings:
        settings.write(SETTINGS)
    reader.run("python manage.py makemigrations orders")

    reader.follow(ROOT / "README.md", stop=False)

    reader.run(f'python manage.py shell -v 0 -c "{CREATE}"\npython manage.py shell -v 0 -c "{ORDER}"')
    wait_until(lambda: reader.run(f'python manage.py shell -v 0 -c "{LEFT}"') == ["9"])


def in_a_project(reader_of, environment, name, ports=None):
    """A reader in the directory of a new project."""
    reader = reader_of(environment, ports or {}, name)
    reader.run(f"django-admin startproject {name} .")
    return reader


def test_every_page_of_the_tutorial_is_followed():
    followed = {"celery.md", "dead-letter.md", "existing-project.md", "postgresql.md", "rabbitmq.md"}

    assert {page.name for page in (DOCS / "tutorial").glob("*.md") if list(blocks_of(page))} == followed

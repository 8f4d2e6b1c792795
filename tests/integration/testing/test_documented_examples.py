"""The examples of the pages on testing, as the files of a project that has followed Getting started."""

import os
import re

import pytest
from django.db import connection

from tests.support.pages import DOCS, titled_files
from tests.support.projects import run_in, settings_of

PYTEST = "[pytest]\nDJANGO_SETTINGS_MODULE = shop.settings\npythonpath = .\nfilterwarnings = error\n"


def examples():
    return titled_files(DOCS / "how-to/test-your-handlers.md", titled_files(DOCS / "how-to/test-your-code.md"))


@pytest.fixture
def project(tmp_path, db):
    files = {
        "pytest.ini": PYTEST,
        "shop/__init__.py": "",
        "shop/settings.py": settings_of("outbox", "inbox", "orders", database=a_database()),
        "orders/__init__.py": "",
        "orders/tests/__init__.py": "",
        **{name: text for name, text in titled_files(DOCS / "getting-started.md").items() if name.startswith("orders/")},
        **examples(),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def a_database():
    """The settings of another test database beside that of this test."""
    given = connection.settings_dict
    if connection.vendor == "sqlite":
        return {"ENGINE": given["ENGINE"], "NAME": "project.sqlite3", "TEST": {"NAME": "test.sqlite3"}}
    names = ("ENGINE", "HOST", "PORT", "USER", "PASSWORD")
    return {**{name: given[name] for name in names}, "NAME": "shop", "TEST": {"NAME": f"test_shop_{os.getpid()}"}}


def run(project, *arguments):
    return run_in(project, "shop.settings", "-m", *arguments)


def run_pytest(project, *arguments):
    without = [word for plugin in ("cacheprovider", "schemathesis") for word in ("-p", f"no:{plugin}")]
    return run(project, "pytest", "-q", *without, *arguments)


@pytest.mark.every_database
def test_examples_pass_in_pytest(project):
    documented = sum(text.count("def test_") for text in examples().values())

    done = run_pytest(project)

    assert done.returncode == 0, done.stdout
    assert f"{documented} passed" in done.stdout


@pytest.mark.every_database
def test_examples_pass_in_the_test_runner_of_django(project):
    done = run(project, "django", "test", "orders.tests.test_placing")

    assert done.returncode == 0, done.stdout
    assert "Ran 2 tests" in done.stdout


@pytest.mark.every_database
def test_failure_has_the_text_that_the_page_shows(project):
    page = (DOCS / "how-to/test-your-code.md").read_text()
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (project / "orders" / "tests" / "test_placing.py").write_text(
        "import pytest\n"
        "from orders.services import place_order\n"
        "@pytest.mark.django_db\n"
        "def test_other_order(outbox_assert_published):\n"
        "    place_order('1001', 'pen')\n"
        "    outbox_assert_published('shop.order.placed', payload__order='1002')\n"
    )

    done = run_pytest(project, "orders/tests/test_placing.py")

    assert [line.removeprefix("E").strip() for line in done.stdout.splitlines() if line.startswith("E ")] == [
        ("AssertionError: " if number == 0 else "") + line.strip() for number, line in enumerate(shown.splitlines())
    ]

"""A project that has left out what a part needs: it does not start, and the error says what to add."""

import pytest

from tests.support.projects import run_in, settings_of

SETUP = "import django; django.setup()"
WITHOUT_NINJA = f"""
import sys
sys.modules["ninja"] = sys.modules["pydantic"] = None
{SETUP}
import %s.contrib.http.urls
"""


@pytest.fixture
def started(tmp_path):
    """What a project with these settings prints when it runs a program."""

    def run(settings, program=SETUP):
        (tmp_path / "settings.py").write_text(settings)
        done = run_in(tmp_path, "settings", "-c", program)
        assert done.returncode == 1, done.stdout
        return done.stdout

    return run


@pytest.mark.parametrize(
    "apps",
    [["outbox", "inbox.contrib.joins"], ["inbox.contrib.outgoing_webhooks"], ["inbox", "outbox.contrib.recurring"]],
    ids=lambda apps: apps[-1],
)
def test_product_without_the_app_that_it_needs_names_that_app(started, apps):
    needed = apps[-1].partition(".")[0]
    assert f"{apps[-1]!r} needs {needed!r}: write INSTALLED_APPS += [{needed!r}]." in started(settings_of(*apps))


def test_product_without_any_other_app_names_both(started):
    alone = settings_of("inbox.contrib.joins").replace("'exactly_once', ", "")

    assert "needs 'exactly_once' and 'inbox': write INSTALLED_APPS += ['exactly_once', 'inbox']." in started(alone)


@pytest.mark.parametrize("half", ["outbox", "inbox"])
def test_name_of_a_product_without_its_app_names_the_app(started, half):
    product = {"outbox": "outbox.contrib.recurring import recurring", "inbox": "inbox.contrib.joins import joined_handler"}[
        half
    ]
    printed = started(settings_of(half), f"{SETUP}\nfrom {product}")
    assert f"add {product.partition(' ')[0]!r} to INSTALLED_APPS and run migrate." in printed


@pytest.mark.parametrize(
    "module",
    ["inbox.contrib.joins.decorators", "inbox.contrib.outgoing_webhooks.fanning_out", "outbox.contrib.recurring.models"],
)
def test_module_of_a_product_without_its_app_names_the_app_and_puts_no_table_into_another(started, module):
    printed = started(settings_of(module.partition(".")[0]), f"{SETUP}\nimport {module}")

    package = module.rpartition(".")[0]
    assert f"{package} is an app of its own: add {package!r} to INSTALLED_APPS and run migrate." in printed


def test_http_api_of_the_outbox_without_the_app_that_stores_answers_names_it(started):
    printed = started(settings_of("outbox"), f"{SETUP}\nimport outbox.contrib.http.urls")

    assert "add 'exactly_once.contrib.views' to INSTALLED_APPS and run migrate." in printed


@pytest.mark.parametrize("half", ["outbox", "inbox"])
def test_half_without_the_third_app_names_it(started, half):
    alone = settings_of(half).replace("'exactly_once', ", "")

    assert f"{half!r} needs 'exactly_once': write INSTALLED_APPS += ['exactly_once']." in started(alone)


@pytest.mark.parametrize("half", ["outbox", "inbox"])
def test_http_api_without_django_ninja_names_the_extra(started, half):
    printed = started(settings_of(half), WITHOUT_NINJA % half)

    assert 'The HTTP API needs Django Ninja: pip install "django-exactly-once[http]".' in printed

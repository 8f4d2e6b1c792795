"""The demo as a person runs it, only smaller: real processes, real kills, and an audit that has to pass."""

import json
import random
import re
from contextlib import suppress
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from demo_shop.simulation.audit import EFFECTS, ORDER
from tests.support.servers.private import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(400)

ORDERS = 30
KILLS = 3
"""A relay, a consumer and a customer of the banks."""
TIMEOUT_SECONDS = 90


@pytest.fixture
def run_demo(run_in_the_shop):
    def run(*options, **environment):
        for alias in ("default", "savings"):
            migrated = run_in_the_shop(
                "manage.py", "migrate", "--verbosity", "0", "--database", alias, timeout=60, **environment
            )
            assert migrated.returncode == 0, migrated.stderr
        return run_in_the_shop(
            "manage.py", "demo", "--json", "--timeout", str(TIMEOUT_SECONDS), *options, timeout=195, **environment
        )

    return run


@pytest.fixture
def on_postgresql(postgres_server):
    """The environment of a demo with the shop and the savings bank in empty databases of this test's own."""
    urls = {name: postgres_server.create_database() for name in ("DATABASE_URL", "SAVINGS_DATABASE_URL")}
    yield urls
    for url in urls.values():
        postgres_server.drop_database(url.rpartition("/")[2])


def audited(finished):
    """The audit that the demo printed; it must have passed."""
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "createsuperuser" in finished.stderr
    assert re.search(r"^    DEBUG=1 \S+ manage.py runserver$", finished.stderr, re.MULTILINE)
    assert "http://127.0.0.1:8000/admin/" in finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def assert_everything_happened_once(report):
    assert report["passed"]
    assert report["orders"] == ORDERS
    assert report["effects"] == dict.fromkeys(EFFECTS, ORDERS - report["taken_back"]) | {ORDER: ORDERS}
    assert [report[fault] for fault in ("lost", "doubled", "ghosts", "early", "problems")] == [[], [], [], [], []]
    assert report["rolled_back"] > 0
    assert report["taken_back"] > 0
    assert report["receipts_refused_at_first"] > 0
    assert report["duplicates_suppressed"] >= report["duplicates_injected"] > 0
    assert report["webhook_calls_repeated"] > 0
    assert report["webhook_calls_refused"] > 0
    assert report["dead"] == 0
    transfers = report["transfers"]
    assert transfers["withdrawn"] == transfers["deposited"] > 0
    assert transfers["given_up_by_the_checker"] > 0
    assert transfers["money_missing"] == 0


def test_without_a_broker_every_effect_happens_once_although_processes_are_killed_and_in_a_second_run(run_demo):
    """What the first run left does not disturb the second, which buys the same again."""
    seed = str(random.randrange(10**6))
    first = audited(run_demo("--orders", str(ORDERS), "--seed", seed, "--kills", str(KILLS)))
    second = audited(run_demo("--orders", str(ORDERS), "--seed", seed, "--no-kills"))

    assert_everything_happened_once(first)
    assert first["kills"] == KILLS
    assert_everything_happened_once(second)
    assert second["kills"] == 0


def test_with_rabbitmq_every_effect_happens_once_although_processes_are_killed(run_demo, on_postgresql, rabbitmq_url):
    report = audited(run_demo("--orders", str(ORDERS), "--kills", str(KILLS), **on_postgresql, BROKER_URL=rabbitmq_url))

    assert_everything_happened_once(report)
    assert report["kills"] == KILLS
    assert report["copied_on_the_broker"] > 0


def test_a_run_that_exceeds_its_timeout_fails_and_says_what_is_missing(run_demo):
    finished = run_demo("--orders", str(ORDERS), "--no-kills", "--timeout", "0")

    assert finished.returncode == 1
    report = json.loads(finished.stdout.splitlines()[-1])
    assert not report["passed"]
    assert any("orders are not placed" in problem for problem in report["problems"])


def test_without_tables_the_demo_fails_and_names_the_migrate_command(run_in_the_shop):
    finished = run_in_the_shop("manage.py", "demo", timeout=60)

    assert finished.returncode == 1
    assert "manage.py migrate" in finished.stderr


def test_runserver_with_debug_as_the_demo_says_serves_the_stylesheets_of_the_admin(run_in_the_shop):
    port = free_port()
    run_in_the_shop.start("manage.py", "runserver", "--noreload", str(port), DEBUG="1")

    def stylesheet():
        with suppress(URLError), urlopen(f"http://127.0.0.1:{port}/static/exactly_once/admin.css", timeout=5) as answer:
            return answer.headers["Content-Type"]
        return ""

    wait_until(lambda: stylesheet().startswith("text/css"))

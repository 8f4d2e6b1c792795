"""How many connections a process holds, as `docs/how-to/scale.md` counts them for `max_connections` and the size of a pool."""

import pytest
from django.db import transaction

from outbox import publish
from tests.support.apps.worker import JOB
from tests.support.deliveries import effects
from tests.support.sql import executed, fetched
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

SESSIONS = "FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend' AND backend_start > %s"
ALERTS = 1
"""Connected for a moment each minute."""


def publish_jobs(count):
    with transaction.atomic():
        for _ in range(count):
            publish(JOB, {})


@pytest.fixture
def start():
    """Sessions of earlier tests may end during this one, so none that is older than this instant is counted."""
    return fetched("SELECT clock_timestamp()")


@pytest.fixture
def sessions(start):
    return lambda: fetched(f"SELECT count(*) {SESSIONS}", [start])


@pytest.fixture
def names(start):
    return lambda: {name for (name,) in executed(f"SELECT DISTINCT application_name {SESSIONS}", [start])}


def test_connections_of_a_relay_and_of_a_consumer_are_those_of_the_page_and_have_the_name_of_their_process(
    a_process, rabbitmq_url, rabbitmq_server, sessions, names
):
    """Relay: two lanes, timer, housekeeping, operations; doorbell. Consumer: threads; main loop and three companions."""
    relay, threads = 5 + 1, 3
    consumer = threads + 4

    with a_process("inbox_consume", CONCURRENCY=threads):
        wait_until(lambda: sessions() == consumer)
        wait_until(lambda: rabbitmq_server.connections(rabbitmq_url) == 1)
        with a_process("outbox_relay"):
            wait_until(lambda: sessions() == consumer + relay)
            wait_until(lambda: rabbitmq_server.connections(rabbitmq_url) == 1 + 2)
            wait_until(lambda: names() >= {"inbox_consume", "outbox_relay", "outbox listener"})
            assert "" not in names()

            publish_jobs(100)
            wait_until(lambda: effects() == 100)

            assert sessions() <= consumer + relay + 2 * ALERTS
            assert rabbitmq_server.connections(rabbitmq_url) == 1 + 2


def test_connections_have_the_name_that_the_project_gives_them(a_process, process_environment, names):
    process_environment["PGAPPNAME"] = "shop"
    with a_process("outbox_relay"):
        wait_until(lambda: "shop" in names())
        assert not names() & {"outbox_relay", "outbox listener"}


def test_connections_of_a_relay_that_runs_the_handlers_are_those_of_the_page(command, sessions):
    """One lane, timer, housekeeping and operations of both apps, one runner, heartbeat; and the doorbell."""
    relay = 8 + 1

    with command("outbox_relay", OUTBOX={"BROKER_URL": "local://"}):
        wait_until(lambda: sessions() == relay)

        publish_jobs(100)
        wait_until(lambda: effects() == 100)

        assert sessions() <= relay + ALERTS

"""The database is read-only, as a standby is: the relay sends nothing, because it could not settle it."""

from urllib.parse import urlsplit

import psycopg
import pytest

from tests.support import mortal
from tests.support.relaying import Queue, ids, published
from tests.support.waiting import wait_until
from tests.support.workers import migrate

pytestmark = pytest.mark.django_db(transaction=True)

mortal_database = mortal.mortal_database

REMEDY = "point DATABASES['default'] at the primary"
LOOPS = 3
"""Loops of one relay process that use the database. Each of them reports an outage once."""


@pytest.fixture
def relay(command, mortal_database, process_environment, rabbitmq_url, tmp_path):
    """Start `outbox_relay` on the database of this URL; by default on the test's own."""
    migrate({**process_environment, "DATABASE_URL": mortal_database}, tmp_path / "migrate.log")

    def start(url=mortal_database):
        variables = {"DATABASE_URL": url, "PGAPPNAME": "outbox_relay"}
        return command("outbox_relay", variables=variables, OUTBOX={"BROKER_URL": rabbitmq_url})

    return start


def refusals(server):
    """The number of statements that a server has refused because it is read-only."""
    return server.log.read_text().count("in a read-only transaction") if server.log.exists() else 0


def assert_it_was_reported_once(process):
    assert 1 <= process.said().count(REMEDY) <= LOOPS, process.said()
    assert "Traceback" not in process.said()


def test_relay_on_a_standby_sends_nothing_and_names_the_remedy_and_goes_on_when_it_is_promoted(
    relay, mortal_postgres, mortal_database, rabbitmq_url
):
    with Queue(rabbitmq_url) as queue, mortal_postgres.standby() as standby:
        messages = [published() for _ in range(20)]
        wait_until(standby.has_caught_up)
        url = standby.url_of(urlsplit(mortal_database).path[1:])
        with relay(url) as process, psycopg.connect(url, autocommit=True) as promoted:
            process.until(lambda: REMEDY in process.said())
            process.until(lambda: refusals(standby) > 3 * LOOPS)

            assert queue.take_all() == []
            assert_it_was_reported_once(process)
            standby.promote()
            process.until(lambda: states(promoted) == {"published"})
            assert sorted(ids(queue.take_all())) == sorted(ids(messages))
            assert process.end() == 0


def test_relay_on_a_database_that_was_made_read_only_sends_nothing_until_it_is_writable_again(
    relay, mortal_postgres, mortal_database, rabbitmq_url
):
    before = refusals(mortal_postgres)
    name = urlsplit(mortal_database).path[1:]
    with Queue(rabbitmq_url) as queue, psycopg.connect(mortal_database, autocommit=True) as operator, relay() as process:
        messages = [published()]
        process.until(lambda: states(operator) == {"published"})
        operator.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        end_the_sessions_of_the_relay(operator)
        process.until(lambda: REMEDY in process.said())
        messages.append(published())
        process.until(lambda: refusals(mortal_postgres) > before + 3 * LOOPS)

        assert ids(queue.take_all()) == ids(messages[:1])
        assert_it_was_reported_once(process)
        operator.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        process.until(lambda: states(operator) == {"published"})
        assert ids(queue.take_all()) == ids(messages[1:])


def states(connection):
    return {state for (state,) in connection.execute("SELECT state FROM outbox_outboxmessage").fetchall()}


def end_the_sessions_of_the_relay(operator):
    operator.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name = 'outbox_relay'"
    )

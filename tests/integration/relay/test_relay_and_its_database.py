"""The database is read-only or reads slowly: the relay sends what it could settle. An idle relay polls it rarely."""

import re
import time
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urlsplit

import psycopg
import pytest
from django.db import connection

from outbox.models import OutboxMessage
from outbox.states import State
from tests.support import mortal
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.relaying import Queue, ids, published, published_many
from tests.support.sql import executed
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


COUNTED_SECONDS = 20
MOST_A_SECOND = 2


@pytest.mark.timeout(200)
def test_idle_relay_executes_at_most_two_statements_a_second_while_the_doorbell_reaches_it(
    mortal_postgres, mortal_database, process_environment, command, rabbitmq_url, tmp_path
):
    process_environment["DATABASE_URL"] = mortal_database
    migrate(process_environment, tmp_path / "migrate.log")
    process_environment["PGOPTIONS"] = "-c log_statement=all"

    def executed():
        return len(re.findall("LOG:  (statement|execute)", mortal_postgres.log.read_text()))

    def executed_in_a_while():
        before = executed()
        time.sleep(COUNTED_SECONDS)
        return executed() - before

    with Queue(rabbitmq_url) as queue, command("outbox_relay", OUTBOX={"BROKER_URL": rabbitmq_url}):
        wait_until(lambda: executed_in_a_while() <= MOST_A_SECOND * COUNTED_SECONDS, 6 * COUNTED_SECONDS)
        message = published()
        taken = []
        wait_until(lambda: taken.extend(ids(queue.take_all())) or taken)
        assert taken == [str(message.id)]


MESSAGES = 600
"""Each of the relay's lanes reads half of them."""
DEADLINE = timedelta(seconds=0.4)
"""The database grants a pass two more seconds."""


@contextmanager
def slow_reads(seconds_per_row):
    """For its role, each ready row that is read takes long, as with a slow disk or a costly row security policy."""
    name = connection.settings_dict["NAME"]
    try:
        executed(
            "CREATE ROLE slow_reader LOGIN; "
            f'GRANT ALL ON DATABASE "{name}" TO slow_reader; '
            "GRANT ALL ON ALL TABLES IN SCHEMA public TO slow_reader; "
            "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO slow_reader; "
            f"CREATE FUNCTION slowly() RETURNS boolean LANGUAGE sql AS 'SELECT pg_sleep({seconds_per_row}) IS NOT NULL'; "
            "CREATE POLICY slow ON outbox_outboxmessage_live USING (state <> 'ready' OR slowly()) WITH CHECK (true); "
            "ALTER TABLE outbox_outboxmessage_live ENABLE ROW LEVEL SECURITY",
        )
        yield "slow_reader"
    finally:
        executed(
            "ALTER TABLE outbox_outboxmessage_live DISABLE ROW LEVEL SECURITY; "
            "DROP POLICY IF EXISTS slow ON outbox_outboxmessage_live; "
            "DROP FUNCTION IF EXISTS slowly(); "
            "DROP OWNED BY slow_reader; "
            "DROP ROLE slow_reader",
        )


def published_so_far():
    return OutboxMessage.objects.filter(state=State.PUBLISHED).count()


@pytest.mark.parametrize("seconds_per_row", [0.004, 0.01], ids=["read after the deadline", "statement timeout"])
def test_relay_that_reads_too_slowly_takes_fewer_messages_and_publishes_them(process_environment, command, seconds_per_row):
    published_many(MESSAGES)
    with FakeAmqpPeer() as peer, slow_reads(seconds_per_row) as role:
        scheme, _, rest = process_environment["DATABASE_URL"].partition("://")
        process_environment["DATABASE_URL"] = f"{scheme}://{role}@{rest.rpartition('@')[2]}"
        began_at = time.monotonic()
        with command("outbox_relay", OUTBOX={"BROKER_URL": peer.url, "BATCH_DEADLINE": DEADLINE}) as relay:
            relay.until(lambda: published_so_far() >= MESSAGES / 10)
            said = relay.said()
            executed("ALTER TABLE outbox_outboxmessage_live DISABLE ROW LEVEL SECURITY")
            relay.until(lambda: published_so_far() == MESSAGES)

    minutes = 1 + (time.monotonic() - began_at) // 60
    assert 1 <= said.count("took too long") <= 2 * minutes, "once a minute for each of its two lanes"
    assert "Traceback" not in said

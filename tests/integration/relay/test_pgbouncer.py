"""Behind PgBouncer in transaction mode: everything works as without it, and no session state stays on a server connection."""

import logging
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial

import psycopg
import pytest
from django.db import connection, connections, transaction

from exactly_once.process.loop import StopRequest
from exactly_once.sql.days import day_of
from inbox.checks import check_vanished_hosts
from inbox.store.buckets import lease_tokens
from outbox import doorbell
from outbox.conf import OutboxOptions
from outbox.doorbell import CHANNEL, ring_after_commit
from outbox.relay.housekeeping import Housekeeper
from outbox.relay.listening import APPLICATION_NAME, Listener
from outbox.store import history
from tests.support.aliases import an_alias, the_default_at
from tests.support.deliveries import at_once, deliver, the_effect
from tests.support.relaying import SECONDS, a_backlog, connected, one_pass, published, relaying
from tests.support.relaying import waiting as anything_waits
from tests.support.servers import PgBouncer
from tests.support.sql import another_session
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

A_LOT = 300

FOLLOWED = {"application_name", "client_encoding", "DateStyle", "TimeZone", "standard_conforming_strings", "IntervalStyle"}
"""Settings that PgBouncer sets for each client on the connection that it assigns."""


@pytest.fixture(scope="module")
def pgbouncer(django_db_setup):
    settings = connection.settings_dict
    with PgBouncer(int(settings["PORT"] or 5432), user=settings["USER"]) as server:
        yield server


@pytest.fixture(autouse=True)
def pooled(pgbouncer, transactional_db):
    """The suite's database, reached through the pooler, and directly by the alias "direct"."""
    doorbell._ring_of.cache_clear()
    with an_alias("direct"), the_default_at(PORT=pgbouncer.port):
        yield pgbouncer


@contextmanager
def every_server_connection(pgbouncer):
    """One client on each of the pooler's connections to this database, all at the same time."""
    name = connection.settings_dict["NAME"]
    with ExitStack() as stack:
        clients = [
            stack.enter_context(psycopg.connect(pgbouncer.url_of(name), autocommit=True)) for _ in range(pgbouncer.pool_size)
        ]
        for client in clients:
            client.execute("BEGIN")
        pids = {client.execute("SELECT pg_backend_pid()").fetchone() for client in clients}
        assert len(pids) == pgbouncer.pool_size
        yield clients


def left_behind(pgbouncer):
    """The session state that clients have left on the server connections of the pooler."""
    found = set()
    with every_server_connection(pgbouncer) as clients:
        for client in clients:
            changed = client.execute(
                "SELECT name, setting FROM pg_settings WHERE source = 'session' AND setting <> reset_val"
            ).fetchall()
            found |= {(name, value) for name, value in changed if name not in FOLLOWED}
            for what in ("pg_listening_channels()", "pg_cursors", "pg_prepared_statements"):
                if client.execute(f"SELECT FROM {what}").fetchall():
                    found.add(what)
        if clients[0].execute("SELECT FROM pg_locks WHERE locktype = 'advisory'").fetchall():
            found.add("advisory locks")
    return found


def test_no_session_state_is_left_on_the_server_connections(pgbouncer, peer, handles):
    handler = handles(the_effect)
    a_backlog(A_LOT)
    published(delay=timedelta(seconds=0.2))
    with relaying(peer.url, relays=2, timed=True, BATCH_SIZE=50):
        wait_until(lambda: not anything_waits())
    for _ in range(5):
        deliver(handler)
    with connected(peer.url) as transport:
        published(delay=timedelta(milliseconds=1))
        one_pass(transport)
    with transaction.atomic():
        ring_after_commit("default")

    assert left_behind(pgbouncer) == set()


def test_housekeeping_makes_and_drops_days_and_leaves_no_session_state(pgbouncer):
    today = day_of("default")
    existing = partial(history.HISTORY.days.existing, "default")
    before = {today, *existing()}  # of earlier tests
    history.HISTORY.days.make("default", today - 20)

    Housekeeper("default", OutboxOptions()).drain(StopRequest())

    assert {*existing()} - before == {today + 1, today + 2, today + 3} - before
    assert {*existing()} >= {today + 1, today + 2, today + 3}
    assert left_behind(pgbouncer) == set()


def test_session_state_left_on_a_server_connection_is_detected(pgbouncer):
    """Proof that the test above can fail."""
    with psycopg.connect(pgbouncer.url_of(connection.settings_dict["NAME"]), autocommit=True) as client:
        client.execute("SET statement_timeout = 4321")
        client.execute("LISTEN something")
        client.execute("SELECT pg_advisory_lock(4321)")
        try:
            assert left_behind(pgbouncer) == {("statement_timeout", "4321"), "pg_listening_channels()", "advisory locks"}
        finally:
            with every_server_connection(pgbouncer) as clients:
                for each in clients:
                    each.execute("COMMIT; BEGIN; SELECT pg_advisory_unlock_all(); RESET ALL; UNLISTEN *; COMMIT; BEGIN")


class TestDoorbell:
    @pytest.fixture(autouse=True)
    def log(self, caplog):
        caplog.set_level(logging.WARNING)
        return caplog

    def test_commit_through_the_pooler_reaches_a_listener_that_bypasses_it(self, bell, never):
        with Listener("default", [bell], OutboxOptions(LISTEN_ALIAS="direct")).listening():
            assert bell.wait(SECONDS, never)
            with transaction.atomic():
                ring_after_commit("default")

            assert bell.wait(SECONDS, never)

    def test_listener_behind_the_pooler_warns_and_does_not_listen(self, pgbouncer, bell, never, log):
        """The LISTEN would stay on a server connection that another client gets next."""
        with Listener("default", [bell], OutboxOptions()).listening():
            wait_until(lambda: "The database 'default' is behind a pooler" in log.text)
            wait_until(lambda: not any(client["application_name"] == APPLICATION_NAME for client in pgbouncer.show("clients")))

        assert not bell.wait(0, never)
        assert left_behind(pgbouncer) == set()

    def test_listener_works_through_a_session_pooler_named_by_listen_alias(self, bell, never):
        behind = connections["direct"].settings_dict
        with (
            PgBouncer(int(behind["PORT"]), user=behind["USER"], pool_mode="session") as sessions,
            an_alias("sessions", PORT=sessions.port),
            Listener("default", [bell], OutboxOptions(LISTEN_ALIAS="sessions")).listening(),
        ):
            assert bell.wait(SECONDS, never)
            with another_session("direct", autocommit=True) as outside:
                outside.execute(f"NOTIFY {CHANNEL}")

            assert bell.wait(SECONDS, never)


def test_handlers_without_a_timeout_are_named_because_the_server_does_not_notice_a_vanished_host(pooled, handles):
    handles(the_effect, name="tests.unbounded")
    handles(the_effect, name="tests.bounded", timeout=timedelta(seconds=30))

    [warning] = check_vanished_hosts(None, databases=["default"])
    assert (warning.id, "no timeout: tests.unbounded. If" in warning.msg) == ("inbox.W012", True)

    with the_default_at(PORT=connections["direct"].settings_dict["PORT"]):
        assert not check_vanished_hosts(None, databases=["default"])


def test_leasing_rate_limit_tokens_leaves_no_setting_on_a_connection(pooled):
    leased = at_once([lambda: lease_tokens("default", "limited", rate=1e-9, burst=20.0, most=15)] * 4)

    assert sum(one.tokens for one in leased) == 20
    with connection.cursor() as cursor:
        for _ in range(10):
            cursor.execute("SHOW synchronous_commit")
            assert cursor.fetchone() == ("on",)

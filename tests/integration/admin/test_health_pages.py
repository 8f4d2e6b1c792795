"""The page of the database's health: what pins the vacuum horizon, and what to do about it."""

import struct
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial

import psycopg
import pytest
from django.db import OperationalError, connection, connections
from django.urls import reverse

from exactly_once.console.admin.database_health import Pin, horizon_warnings, pins
from tests.support.admin_pages import Page, superuser_client
from tests.support.deliveries import InAThread
from tests.support.waiting import wait_until

HEALTH = "admin:exactly_once_databasehealth_changelist"


def the_text():
    return " ".join(Page(superuser_client().get(reverse(HEALTH))).text.split())


def until_cancelled(cursor):
    with suppress(OperationalError):
        cursor.execute("SELECT pg_sleep(60)")


@pytest.mark.every_database
@pytest.mark.only_sqlite
@pytest.mark.django_db
def test_horizon_that_sqlite_does_not_have_is_unknown():
    assert "Unknown: only PostgreSQL has a vacuum horizon." in the_text()


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestHorizon:
    def test_session_that_holds_the_horizon_is_named_with_pid_application_and_user(self):
        with closing(connections["default"].copy()) as other, other.cursor() as holder:
            holder.execute("SET application_name = '<nightly> report'")
            holder.execute("SELECT pg_backend_pid()")
            (pid,) = holder.fetchone()
            holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT count(*) FROM outbox_trailentry")
            found, text = pins("default"), the_text()
            holder.execute("ROLLBACK")

        [pin] = [pin for pin in found if pin.name == str(pid)]
        assert (pin.kind, pin.who) == ("session", f"<nightly> report, {connection.settings_dict['USER']}")
        assert pin.open_for is not None
        assert f"Session {pid} ({pin.who})" in text
        assert f"SELECT pg_terminate_backend({pid});" in text
        assert str(pid) not in [pin.name for pin in pins("default")]

    def test_worker_of_the_server_is_named_without_a_statement_that_ends_it(self):
        """A parallel worker, which has the snapshot of the session that it works for."""
        setting = "debug_parallel_query" if connection.pg_version >= 160_000 else "force_parallel_mode"
        with closing(connections["default"].copy()) as other, other.cursor() as holder:
            holder.execute(f"SET {setting} = on")
            with InAThread(partial(until_cancelled, holder)):
                wait_until(lambda: "parallel worker" in [pin.kind for pin in pins("default")])
                worker = next(pin for pin in pins("default") if pin.kind == "parallel worker")
                text = the_text()
                other.connection.cancel()

        assert f"Server process {worker.name}, parallel worker" in str(worker)
        assert f"pg_terminate_backend({worker.name})" not in text
        assert worker.remedy[1] == ""

    def test_replica_with_feedback_is_named_and_is_not_open_for_zero_seconds(self):
        settings = connection.settings_dict
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_current_wal_lsn(), CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint)")
            position, oldest = cursor.fetchone()
        to = {name: settings[name.upper()] for name in ("host", "port", "user", "password")}
        with closing(psycopg.connect(**to, replication="true", application_name="standby")) as standby:
            replica = standby.pgconn
            replica.exec_(f"START_REPLICATION PHYSICAL {position}".encode())
            replica.put_copy_data(b"h" + struct.pack("!qIIII", 0, oldest, 0, 0, 0))  # the feedback of a hot standby
            replica.flush()
            wait_until(lambda: [pin.kind for pin in pins("default")] == ["replica"])

            assert [pin.open_for for pin in pins("default")] == [None]
            assert "hot_standby_feedback = off" in the_text()


@pytest.mark.parametrize(
    ("pin", "statement"),
    [
        (Pin("replication slot", "standby", 5), "SELECT pg_drop_replication_slot('standby');"),
        (Pin("prepared transaction", "ada's", 5), "COMMIT PREPARED 'ada''s' or ROLLBACK PREPARED 'ada''s'"),
    ],
)
def test_statement_that_frees_the_horizon_quotes_the_name(pin, statement):
    assert pin.remedy[1] == statement


def test_transactions_that_are_open_for_long_are_one_line():
    found = [Pin("session", str(pid), 40, "inbox_consume", "", timedelta(minutes=pid)) for pid in (3, 17, 18)]

    [several], [one] = horizon_warnings(found), horizon_warnings(found[:2])

    assert several.startswith(
        "Session 17 (inbox_consume), Session 18 (inbox_consume) have held back the vacuum horizon, the first for 18 min"
    )
    assert one.startswith("Session 17 (inbox_consume) has held back the vacuum horizon for 17 min")


@pytest.mark.parametrize(
    ("kind", "named"), [("replication slot", "Replication slot a"), ("replica", "Replica of the session a")]
)
def test_replication_that_holds_many_transactions_is_reported(kind, named):
    [line] = horizon_warnings([Pin(kind, "a", 2_000_000), Pin(kind, "b", 2_000)])

    assert line.startswith(f"{named} has held back the vacuum horizon for 2,000,000 transactions")

"""The page of the database's health: sizes, the vacuum horizon, and how far the purge is behind."""

from contextlib import closing
from datetime import timedelta

import pytest
from django.db import connection, connections
from django.urls import reverse

from exactly_once.console.admin.database_health import horizon_warnings
from exactly_once.console.operators import database_health as health
from exactly_once.console.operators.database_health import Pin
from exactly_once.process.clock import utcnow
from outbox.models import TrailEntry
from outbox.store import history
from tests.support.admin_pages import Page, superuser_client

HEALTH = "admin:exactly_once_databasehealth_changelist"


def the_page():
    return Page(superuser_client().get(reverse(HEALTH)))


@pytest.mark.every_database
@pytest.mark.django_db
class TestOnEveryDatabase:
    def test_size_of_the_database_is_shown(self):
        assert health.database_bytes("default") > 10_000
        assert "Size of the database “default”:" in the_page().text

    def test_purge_that_is_behind_is_shown_with_its_lag(self):
        TrailEntry.objects.create(
            message_id="0" * 32, was="ready", became="dead", at=utcnow() - timedelta(days=40), process="host:1"
        )
        assert "40 d, kept for 30 d: the purge is 10 d behind" in the_page().text


@pytest.mark.every_database
@pytest.mark.only_sqlite
@pytest.mark.django_db
def test_figures_that_sqlite_does_not_have_are_unknown():
    text = the_page().text

    assert "Unknown: only PostgreSQL reports the sizes and dead rows of tables." in text
    assert "Unknown: only PostgreSQL has a vacuum horizon." in text


@pytest.mark.django_db
class TestOnPostgreSQL:
    def test_tables_indexes_and_partitions_are_listed(self):
        text = "".join(the_page().text.split())

        for expected in ("outbox_outboxmessage_live", "outbox_outboxmessage_history_default", "outbox_trailentry", "never"):
            assert expected in text
        for expected in ("inbox_inboxmessage", "inbox_joins_run", "exactly_once_auditentry"):
            assert expected in text

    def test_partitions_of_history_are_one_table_among_the_tables(self):
        for day in history.HISTORY.days.existing("default"):  # of earlier tests
            history.HISTORY.drop_day("default", day)
        found = health.tables("default", ["outbox_outboxmessage"])
        assert {table.name: table.parent for table in found} == {
            "outbox_outboxmessage_live": "",
            "outbox_outboxmessage_history_default": "outbox_outboxmessage_history",
        }
        summed = {table.name: table.partitions for table in health.with_partitions_summed(found)}
        assert summed == {"outbox_outboxmessage_live": 0, "outbox_outboxmessage_history": 1}

    def test_size_of_a_table_includes_its_indexes(self):
        [table] = health.tables("default", ["outbox_trailentry"])
        assert table.total_bytes == table.table_bytes + table.index_bytes > 0


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestHorizon:
    def test_session_that_holds_the_horizon_is_named_with_pid_application_and_user(self):
        with closing(connections["default"].copy()) as other, other.cursor() as holder:
            holder.execute("SET application_name = '<nightly> report'")
            holder.execute("SELECT pg_backend_pid()")
            (pid,) = holder.fetchone()
            holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT count(*) FROM outbox_trailentry")
            found = health.pins("default")
            text = " ".join(the_page().text.split())
            holder.execute("ROLLBACK")

        [pin] = [pin for pin in found if pin.name == str(pid)]
        assert (pin.kind, pin.application, pin.user) == ("session", "<nightly> report", connection.settings_dict["USER"])
        assert pin.open_for is not None
        assert f"Session {pid} (<nightly> report, {pin.user})" in text
        assert str(pid) not in [pin.name for pin in health.pins("default")]


def test_transaction_that_is_open_for_long_is_reported():
    pin = Pin(kind="session", name="17", age=5, application="report", user="ada", open_for=timedelta(hours=2))

    [line] = horizon_warnings([pin, Pin(kind="session", name="18", age=1, open_for=timedelta(seconds=3))])

    assert line.startswith("Session 17 (report, ada) has held back the vacuum horizon for 2 h")


def test_sessions_that_hold_the_horizon_are_one_line_with_the_names_of_their_applications():
    pins = [
        Pin(kind="session", name=str(pid), age=40, application="inbox_consume", open_for=timedelta(minutes=pid))
        for pid in (17, 18)
    ]

    [line] = horizon_warnings(pins)

    assert line.startswith(
        "Session 17 (inbox_consume), Session 18 (inbox_consume) have held back the vacuum horizon, the first for 18 min"
    )


def test_replication_slot_that_holds_many_transactions_is_reported():
    [line] = horizon_warnings([Pin(kind="replication slot", name="standby", age=2_000_000)])

    assert line.startswith("Replication slot standby has held back the vacuum horizon for 2,000,000 transactions")

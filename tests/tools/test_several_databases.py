"""The databases of the test suite: the engine, two separate databases, rows shared with threads and processes."""

from contextlib import closing

import pytest
from django.db import connections
from django.db.utils import ConnectionHandler

from tests.settings import database
from tests.support.apps.effects.models import Effect

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(transaction=True, databases=["default", "other"])]


def test_databases_are_two_of_the_engine_that_is_given_by_the_db_option(pytestconfig):
    wanted = {"postgres": "postgresql", "sqlite": "sqlite"}[pytestconfig.getoption("--db")]
    Effect.objects.using("other").create(name="elsewhere")

    assert {connections[alias].vendor for alias in connections} == {wanted}
    assert not Effect.objects.exists()


def test_sqlite_settings_give_a_write_ahead_log_and_immediate_transactions(tmp_path):
    handler = ConnectionHandler({"default": database(f"sqlite:///{tmp_path / 'default.sqlite3'}")})
    with closing(handler["default"]) as sqlite, sqlite.cursor() as cursor:
        assert cursor.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert sqlite.transaction_mode == "IMMEDIATE"

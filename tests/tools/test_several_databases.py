"""The databases of the test suite: the engine, two separate databases, rows shared with threads and processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing

import pytest
from django.db import connection, connections
from django.db.utils import ConnectionHandler

from tests.settings import database
from tests.support.apps.effects.models import Effect

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(transaction=True, databases=["default", "other"])]


def test_database_engine_is_the_one_given_by_the_db_option(pytestconfig):
    wanted = {"postgres": "postgresql", "sqlite": "sqlite"}[pytestconfig.getoption("--db")]

    assert {connections[alias].vendor for alias in connections} == {wanted}


def test_default_and_other_are_separate_databases():
    Effect.objects.using("other").create(name="elsewhere")

    assert not Effect.objects.exists()


def test_thread_sees_committed_rows():
    Effect.objects.create(name="seen")
    seen = []

    def look():
        seen.append(Effect.objects.get().name)
        connection.close()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

    assert seen == ["seen"]


def test_process_sees_committed_rows_and_its_own_commits_are_seen(process_environment):
    Effect.objects.create(name="ours")
    program = (
        "import django; django.setup();"
        "from tests.support.apps.effects.models import Effect;"
        "Effect.objects.create(name='theirs', detail=Effect.objects.get().name)"
    )

    subprocess.run([sys.executable, "-c", program], env=process_environment, check=True)

    assert Effect.objects.get(name="theirs").detail == "ours"


def test_sqlite_settings_give_a_write_ahead_log_and_immediate_transactions(tmp_path):
    handler = ConnectionHandler({"default": database(f"sqlite:///{tmp_path / 'default.sqlite3'}")})
    with closing(handler["default"]) as sqlite, sqlite.cursor() as cursor:
        assert cursor.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert sqlite.transaction_mode == "IMMEDIATE"

"""The ground the other tests stand on: what their databases really are."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from django.db import connection, connections, transaction

from tests.support.apps.effects.models import Effect

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(transaction=True, databases=["default", "other"])]


def test_the_engine_is_the_one_asked_for(pytestconfig):
    wanted = {"postgres": "postgresql", "sqlite": "sqlite"}[pytestconfig.getoption("--db")]

    assert {connections[alias].vendor for alias in connections} == {wanted}


def test_the_two_databases_are_two():
    Effect.objects.using("other").create(name="elsewhere")

    assert not Effect.objects.exists()


def test_a_thread_sees_what_was_committed():
    Effect.objects.create(name="seen")
    seen = []

    def look():
        seen.append(Effect.objects.get().name)
        connection.close()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

    assert seen == ["seen"]


def test_a_process_sees_what_was_committed_and_is_seen(process_environment):
    Effect.objects.create(name="ours")
    program = (
        "import django; django.setup();"
        "from tests.support.apps.effects.models import Effect;"
        "Effect.objects.create(name='theirs', detail=Effect.objects.get().name)"
    )

    subprocess.run([sys.executable, "-c", program], env=process_environment, check=True)

    assert Effect.objects.get(name="theirs").detail == "ours"


def test_a_write_ahead_log_and_immediate_transactions_on_sqlite():
    if connection.vendor != "sqlite":
        return
    with transaction.atomic(), connection.cursor() as cursor:
        assert cursor.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.transaction_mode == "IMMEDIATE"

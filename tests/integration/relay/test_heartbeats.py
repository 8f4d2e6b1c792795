"""The heartbeat of a running relay is correct and cheap, and never blocks the relay."""

import logging
import os
import socket
import threading
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import pytest
from django.db import OperationalError, connections

from exactly_once.models import Process
from exactly_once.process.clock import utcnow
from exactly_once.upkeep import heartbeat_table as kernel
from exactly_once.upkeep.heartbeat_table import SILENT_AFTER
from exactly_once.wire.text import NAME_LENGTH
from outbox.relay import heartbeat as module
from outbox.relay.heartbeat import Heartbeat, relays
from tests.support.deliveries import at_once
from tests.support.heartbeats import fall_silent, write_beat
from tests.support.relaying import in_threads

pytestmark = pytest.mark.django_db

A_MOMENT = timedelta(seconds=10)


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that only the test advances, by its `now`."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def heartbeat(clock):
    return Heartbeat("default")


@pytest.fixture
def next_beat(clock, heartbeat):
    """The row as the next heartbeat writes it, after `seconds`."""

    def beat(seconds=module.HEARTBEAT_SECONDS):
        clock.now += seconds
        heartbeat.beat()
        return the_row()

    return beat


def the_row():
    return relays.rows("default").get()


def is_near(instant, ago=timedelta()):
    return abs(utcnow() - ago - instant) < timedelta(seconds=30)


@pytest.mark.every_database
class TestRow:
    def test_relay_is_silent_once_its_heartbeat_is_older_than_the_limit(self):
        write_beat()
        assert the_row().silent is False

        fall_silent(SILENT_AFTER - A_MOMENT)
        assert the_row().silent is False

        fall_silent(SILENT_AFTER + A_MOMENT)
        assert the_row().silent is True

    def test_mark_stopped_marks_only_the_row_of_that_relay(self):
        ended, running = write_beat(), write_beat()

        relays.mark_stopped("default", ended.id)

        assert the_row().id == running.id
        fall_silent(2 * SILENT_AFTER)
        assert [(row.id, row.silent) for row in relays.known("default")] == [(running.id, True), (ended.id, False)]


class TestHeartbeat:
    def test_first_heartbeat_has_host_pid_version_and_start(self, heartbeat):
        heartbeat.beat()

        row = the_row()
        assert (row.host, row.pid) == (socket.gethostname(), os.getpid())
        assert row.version == version("django-exactly-once")
        assert is_near(row.started_at)
        assert (row.last_pass_at, row.facts["published"], row.rate, row.waits_for) == (None, 0, 0.0, "")

    def test_heartbeat_without_an_installed_version_says_unknown(self, monkeypatch):
        monkeypatch.setattr(kernel, "version", lambda name: (_ for _ in ()).throw(PackageNotFoundError(name)))

        Heartbeat("default").beat()

        assert the_row().version == "unknown"

    def test_heartbeat_is_written_every_two_seconds_and_not_more_often(self, heartbeat, clock, django_assert_num_queries):
        heartbeat.beat()
        heartbeat.published(1)
        clock.now += 1.9
        with django_assert_num_queries(0):
            heartbeat.beat()
        clock.now += 0.1
        with django_assert_num_queries(1):
            heartbeat.beat()

        assert the_row().facts["published"] == 1

    def test_rate_is_of_the_last_seconds_and_falls_to_zero(self, heartbeat, next_beat):
        rates = []
        for _ in range(10):
            heartbeat.published(200)
            rates.append(next_beat().rate)
        assert set(rates) == {100.0}

        falling = [next_beat().rate for _ in range(5)]
        assert falling == sorted(falling, reverse=True)
        assert 0 < falling[0] < 100
        assert falling[-1] == 0.0

    def test_heartbeat_has_the_last_pass_memory_round_trips_shards_mode_and_a_rate_that_is_not_extrapolated(
        self, clock, next_beat, heartbeat
    ):
        heartbeat.published(500)
        heartbeat.passed(shards=32, broker_seconds=0.0125)
        first = next_beat(0.001)
        assert (first.broker_ms, first.facts["shards"], first.mode, first.database_ms) == (12.5, 32, "running", None)
        assert (first.rate, first.memory_bytes > 1_000_000) == (500.0, True)

        clock.now += 60
        second = next_beat()
        assert second.database_ms is not None
        assert is_near(second.last_pass_at, timedelta(seconds=62))

    @pytest.mark.parametrize(
        ("reason", "stored"),
        [
            ("x" * 10_000, "x" * (NAME_LENGTH - 1) + "…"),
            ("two\nlines\x00 and a \ud800 surrogate", "two lines and a surrogate"),
            ("the broker:\n\x1b[2Jgone \u202e", "the broker: [2Jgone"),
            ("é" * 300, "é" * (NAME_LENGTH - 1) + "…"),
        ],
        ids=["long", "control characters", "escape sequence", "multibyte"],
    )
    def test_waits_for_is_one_line_that_fits_its_column_for_any_text(self, heartbeat, next_beat, reason, stored):
        heartbeat.waits_for(reason)

        assert next_beat().waits_for == stored
        assert Process._meta.get_field("waits_for").max_length >= len(stored)

    def test_deleted_row_of_a_frozen_relay_is_inserted_again(self, heartbeat, clock, next_beat):
        next_beat()
        Process.objects.all().delete()

        assert is_near(next_beat(86_400).started_at, timedelta(seconds=86_400))

    def test_closed_heartbeat_marks_its_row_as_stopped_and_writes_no_more(self, heartbeat, clock):
        heartbeat.beat()
        heartbeat.published(3)
        heartbeat.close()
        stopped = Process.objects.get()
        assert is_near(stopped.stopped_at)
        assert stopped.facts["published"] == 3

        clock.now += 60
        heartbeat.beat()
        assert Process.objects.get().beat_at == stopped.beat_at
        assert not relays.rows("default")


@pytest.mark.every_database
@pytest.mark.only_sqlite
class TestHeartbeatOnSQLite:
    """Every heartbeat takes the lock of the only writer, which publishers need."""

    def test_unchanged_heartbeat_is_written_less_often_and_a_changed_one_at_once(
        self, heartbeat, clock, next_beat, django_assert_num_queries
    ):
        heartbeat.beat()
        for _ in range(2):
            clock.now += module.HEARTBEAT_SECONDS
            with django_assert_num_queries(1) as asked:
                heartbeat.beat()
            assert asked[0]["sql"].startswith("SELECT"), "it reads the request of an operator, without the write lock"
        clock.now += module.HEARTBEAT_SECONDS
        with django_assert_num_queries(1) as written:
            heartbeat.beat()
        assert written[0]["sql"].startswith("INSERT")
        heartbeat.waits_for("the broker")
        assert next_beat().waits_for == "the broker"


class TestTwoLoops:
    def test_relay_waits_only_when_both_of_its_loops_wait(self, heartbeat, next_beat):
        heartbeat.waits_for("the broker: connection refused")
        waiting, go_on = threading.Event(), threading.Event()

        def the_other():
            heartbeat.waits_for("")
            waiting.set()
            go_on.wait(30)

        with in_threads(the_other):
            assert waiting.wait(30)
            assert next_beat().waits_for == ""
            go_on.set()

        assert next_beat().waits_for == "the broker: connection refused"  # the loop that worked has ended

    @pytest.mark.every_database
    @pytest.mark.django_db(transaction=True)
    def test_two_loops_that_count_and_write_concurrently_lose_no_count(self, monkeypatch):
        monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.001)
        heartbeat = Heartbeat("default")

        def a_loop():
            for _ in range(200):
                heartbeat.published(1)
                heartbeat.passed()
                heartbeat.beat()

        at_once([a_loop, a_loop])
        monkeypatch.setattr(heartbeat, "_due_at", 0.0)
        heartbeat.beat()

        assert the_row().facts["published"] == 400

    @pytest.mark.django_db(transaction=True)
    def test_loop_does_not_wait_for_the_heartbeat_of_the_other(self, monkeypatch):
        heartbeat = Heartbeat("default")
        writing, go_on, written = threading.Event(), threading.Event(), []

        def slow(alias, identity, **columns):
            written.append(columns)
            writing.set()
            assert go_on.wait(30)

        monkeypatch.setattr(relays, "write", slow)
        with in_threads(heartbeat.beat):
            assert writing.wait(30)
            monkeypatch.setattr(heartbeat, "_due_at", 0.0)
            heartbeat.beat()
            assert len(written) == 1, "it returned while the other loop was writing, and wrote nothing"
            go_on.set()


class TestFailedHeartbeat:
    @pytest.fixture
    def failing_database(self, monkeypatch):
        """Every write of a heartbeat fails while `error` is set; `count` is the number of attempts."""
        real, asked = relays.write, []

        class FailingDatabase:
            error = OperationalError("server closed the connection unexpectedly")
            count = property(lambda self: len(asked))

        def write(alias, identity, **columns):
            asked.append(columns)
            if FailingDatabase.error is not None:
                raise FailingDatabase.error
            real(alias, identity, **columns)

        monkeypatch.setattr(relays, "write", write)
        return FailingDatabase

    def test_failed_heartbeat_is_logged_once_and_written_when_the_database_is_available(
        self, failing_database, heartbeat, clock, caplog, next_beat
    ):
        caplog.set_level(logging.INFO, logger="exactly_once")
        for _ in range(3):
            heartbeat.beat()
            clock.now += module.HEARTBEAT_SECONDS
        assert failing_database().count == 1, "it is not tried again at the next interval"
        assert [record.levelname for record in caplog.records] == ["INFO"]

        failing_database.error = None
        heartbeat.published(1)

        assert next_beat(60).facts["published"] == 1

    @pytest.mark.django_db(transaction=True)
    def test_failed_heartbeat_closes_the_lost_connection_and_its_end_does_not_ask_the_database(
        self, failing_database, heartbeat, monkeypatch
    ):
        connections["default"].ensure_connection()
        heartbeat.beat()
        assert connections["default"].connection is None

        monkeypatch.setattr(relays, "mark_stopped", pytest.fail)
        heartbeat.close()

    @pytest.mark.django_db(transaction=True)
    def test_close_survives_a_failure_to_mark_the_row(self, heartbeat, monkeypatch):
        refused = []

        def mark_stopped(alias, relay, **columns):
            refused.append(relay)
            raise OperationalError("database is locked")

        heartbeat.beat()
        monkeypatch.setattr(relays, "mark_stopped", mark_stopped)

        heartbeat.close()

        assert refused == [the_row().id]

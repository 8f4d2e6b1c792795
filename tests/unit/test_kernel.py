"""The small parts that outbox and inbox share: names, causes, outages, stoppable loops, terminal output."""

import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from datetime import timedelta
from textwrap import indent
from types import SimpleNamespace

import psycopg.errors
import pytest
from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    connection,
)

from exactly_once.console.cli import command, terminal
from exactly_once.console.display import ngettext
from exactly_once.process.clock import utcnow
from exactly_once.process.loop import EXIT_SILENT, StopRequest, running_until_signalled
from exactly_once.process.main_thread import run_until_signalled
from exactly_once.process.outage import Outage, OutageLog
from exactly_once.sql.faults import is_about_values, is_collision, is_lost, is_outage, remedy
from exactly_once.sql.schema import is_missing
from exactly_once.telemetry.tracing import Cause, caused_by, current_cause
from exactly_once.transport import broker
from exactly_once.wire.identity import process_name
from exactly_once.wire.retry import Pause
from exactly_once.wire.text import describe
from tests.support.deliveries import at_once


def test_a_process_is_named_by_host_pid_and_thread():
    host, pid, thread = process_name().rsplit(":", 2)

    assert (host, pid, thread) == (socket.gethostname(), str(os.getpid()), threading.current_thread().name)


class TestCause:
    def test_the_cause_is_reset_when_its_handler_fails(self):
        def fail():
            assert current_cause() == Cause("m", "c", "t")
            raise RuntimeError

        with pytest.raises(RuntimeError), caused_by(Cause("m", "c", "t")):
            fail()

        assert current_cause() == Cause()


def driver_error(sqlstate, message="", kind=OperationalError):
    """What Django raises for an error of PostgreSQL's."""
    cause = psycopg.errors.lookup(sqlstate)(message) if sqlstate else psycopg.OperationalError(message)
    error = kind(message)
    error.__cause__ = cause
    return error


def of_sqlite(code, message):
    cause = sqlite3.OperationalError(message)
    cause.sqlite_errorcode, cause.sqlite_errorname = code, {1: "SQLITE_ERROR", 13: "SQLITE_FULL"}[code]
    error = OperationalError(message)
    error.__cause__ = cause
    return error


def of_psycopg2(pgcode):
    cause = type("OperationalError", (Exception,), {"pgcode": pgcode})("could not translate host name")
    error = OperationalError(str(cause))
    error.__cause__ = cause
    return error


OF_THE_PROGRAM = ["number of parameters must be between 0 and 65535", "another command is already in progress"]
NO_CONNECTION = ["connection refused", "the connection is closed", "server closed the connection unexpectedly"]
COLLISIONS = [
    *map(driver_error, ["40001", "40P01", "55P03", "72000"]),  # serialization failures, deadlocks, lock timeouts, old snapshots
    *map(OperationalError, ["database is locked", "database table is locked: outbox"]),  # of SQLite
]
NOT_RESOLVED = ["failed to resolve host 'db': …", 'could not translate host name "db" to address: …']
OUTAGES = [
    *map(driver_error, ["08006", "08003", "08P01", "28P01", "57P01", "57P02", "57P03", "57P05", "57000"]),
    *map(driver_error, ["25006", "40003", "53100", "53300", "58030", "F0000", "HV00N"]),
    # PostgreSQL classifies them as invalid transaction states, and Django as internal errors.
    driver_error("25P03", "terminating connection due to idle-in-transaction timeout", InternalError),
    driver_error("25P04", "terminating connection due to transaction timeout", InternalError),
    *(driver_error(None, message) for message in [*NO_CONNECTION, *NOT_RESOLVED, "out of memory", "what no list has"]),
    driver_error(None, "error with status PGRES_TUPLES_OK and no message from the libpq", DatabaseError),
    *map(InterfaceError, NO_CONNECTION),
    OperationalError(2006, "…"),  # of a MySQL, which a handler's `biz_id` may read
    of_sqlite(13, "database or disk is full"),
    of_psycopg2("57P01"),
    of_psycopg2(None),
]
NEITHER = [
    *(driver_error(None, f"sending query failed: {message}") for message in OF_THE_PROGRAM),
    driver_error(None, "the last operation didn't produce records", ProgrammingError),
    of_sqlite(1, "no such function: connection"),
    of_psycopg2("22001"),
    *(driver_error(sqlstate, "canceling statement") for sqlstate in ("57014", "42P01", "42501")),
    driver_error("40001", "order refused", ValueError),  # of an application, caused by a database error
    *(DatabaseError("connection"), ValueError("connection refused"), ValueError("database is locked")),
]


class TestDatabaseErrors:
    @pytest.mark.parametrize("error", [*COLLISIONS, *OUTAGES, *NEITHER], ids=lambda error: f"{error!r} {error.__cause__!r}")
    def test_an_error_is_a_collision_an_outage_or_neither(self, error):
        assert (is_collision(error), is_outage(error)) == (error in COLLISIONS, error in OUTAGES)

    @pytest.mark.parametrize(
        ("sqlstate", "kind", "blames_the_row"),
        [
            *((sqlstate, DataError, True) for sqlstate in ("22P05", "22001")),
            *((sqlstate, IntegrityError, True) for sqlstate in ("23505", "23514")),
            ("54000", OperationalError, True),
            *((sqlstate, ProgrammingError, False) for sqlstate in ("42P01", "42501")),
            ("25006", InternalError, False),
            ("23502", IntegrityError, False),  # a column that this version does not write; all that it writes has a value
        ],
    )
    def test_errors_of_values_blame_the_row_and_those_of_the_schema_and_the_server_do_not(self, sqlstate, kind, blames_the_row):
        error = driver_error(sqlstate, "refused", kind)

        assert is_about_values(error) is blames_the_row
        assert not (blames_the_row and is_outage(error))

    @pytest.mark.parametrize("error", [driver_error("23505", "", IntegrityError), of_psycopg2("23505")])
    def test_a_unique_violation_without_names_is_not_one_of_our_ids(self, error):
        assert not is_missing(error)

    @pytest.mark.parametrize(
        ("sqlstate", "lost"),
        [
            *((code, True) for code in ("08006", "57P01", "25P03", "25P04", "28000")),
            *((code, False) for code in ("25006", "53100", "58030", "42P01")),
        ],
    )
    def test_a_session_is_lost_if_the_server_ended_it_and_not_if_it_answers_with_an_error(self, sqlstate, lost):
        assert is_lost(driver_error(sqlstate)) is lost

    def test_whatever_fails_while_a_connection_is_opened_is_an_outage_unless_it_collides(self, monkeypatch):
        fresh = connection.copy()
        for error, outage in [(RuntimeError("no token"), True), (OperationalError("database is locked"), False)]:

            def refuse(*given, error=error):
                raise error

            monkeypatch.setattr(fresh, "get_new_connection", refuse)
            with pytest.raises(type(error)) as caught:
                fresh.connect()
            assert is_outage(caught.value) is is_lost(caught.value) is outage

    @pytest.mark.parametrize(
        ("sqlstate", "alias", "expected"),
        [
            ("42P01", "default", "Run `python manage.py migrate`."),
            ("42703", "other", "Run `python manage.py migrate --database other`."),
            ("53100", "default", "Free disk space on its server."),
            ("XX000", "default", ""),
        ],
    )
    def test_the_remedy_of_a_database_error_names_the_database(self, sqlstate, alias, expected):
        assert remedy(driver_error(sqlstate), alias) == expected


class TestOutage:
    @pytest.fixture
    def outage(self):
        return Outage("the broker", Pause(first_seconds=0.001, cap_seconds=0.001))

    @pytest.fixture
    def clock(self, monkeypatch):
        """The clock of outages, in seconds; a test sets it."""
        clock = SimpleNamespace(now=1000.0)
        monkeypatch.setattr("exactly_once.process.outage.monotonic", lambda: clock.now)
        return clock

    def test_an_ongoing_outage_is_logged_again_at_growing_intervals_with_its_latest_reason_and_remedy(
        self, outage, caplog, clock
    ):
        for second in range(150):
            clock.now = 1000.0 + second
            outage.record(f"disk full for {second} s", "Free some.")
        outage.over()

        first, *again, end = [record.message for record in caplog.records]
        assert "is unavailable (disk full for 0 s). Free some." in first
        assert [text.partition(" (")[0] for text in again] == [
            f"The broker is still unavailable after {seconds} s" for seconds in (10, 30, 70)
        ]
        assert "(disk full for 70 s). Free some." in again[-1]
        assert end == "The broker is available again after 149.0 s."

    def test_an_outage_of_a_day_is_logged_every_ten_minutes(self, outage, caplog, clock):
        for minute in range(24 * 60):
            clock.now = 1000.0 + 60 * minute
            outage.record("connection refused")

        assert 140 <= len(caplog.records) <= 150

    def test_an_outage_that_needs_an_operator_is_an_error_that_is_repeated_with_its_duration(self, outage, caplog, clock):
        for second in range(40):
            clock.now = 1000.0 + second
            outage.record("ACCESS_REFUSED", "Correct it.", describe_error=lambda: "The broker refuses SETTING: ACCESS_REFUSED.")

        first, *again = caplog.records
        assert first.message.startswith("The broker refuses SETTING: ACCESS_REFUSED. Correct it.")
        assert [record.message.rpartition(". ")[2] for record in again] == ["This has lasted 10 s.", "This has lasted 30 s."]
        assert {record.levelname for record in caplog.records} == {"ERROR"}

    def test_an_outage_that_becomes_an_error_is_logged_at_once(self, outage, caplog, clock):
        outage.record("connection refused")
        clock.now += 1
        outage.record("ACCESS_REFUSED", describe_error=lambda: "The broker refuses SETTING.")
        clock.now += 1
        outage.record("connection refused")

        assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]

    def test_loops_that_share_a_log_report_an_outage_and_its_end_once(self, caplog):
        log = OutageLog("the database")
        loops = [Outage("the database", log=log) for _ in range(5)]
        for loop in loops:
            loop.record("connection refused")
        for loop in loops:
            loop.over()

        begin, end = [record.message for record in caplog.records]
        assert "The database is unavailable" in begin
        assert "The database is available again" in end


class TestStopRequest:
    def test_outside_the_main_thread_no_signal_handler_is_installed(self):
        def run():
            with running_until_signalled(StopRequest()):
                return signal.getsignal(signal.SIGTERM)

        assert at_once([run]) == [signal.getsignal(signal.SIGTERM)]


MANUAL_CLOCK = "loop.awake = lambda: now[0]"
"""The test advances the watchdog's clock, so that a stall of the machine is not taken for a silent loop."""


class TestWatchdog:
    """In a process of its own each time, because ending the process is what it does."""

    @staticmethod
    def exit_status_of(body, *, limit):
        program = (
            "import sys; from datetime import timedelta\n"
            "from exactly_once.process.loop import StopRequest, Watchdog\n"
            "from exactly_once.process import loop\n"
            f"stop = StopRequest(); dog = Watchdog(limit=timedelta(seconds={limit}))\n"
            "now = [loop.awake()]\n"
            f"with dog.watching():\n{indent(body, '    ')}\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
        return done.returncode, done.stderr

    @pytest.mark.long
    def test_a_silent_loop_ends_the_process_and_its_stack_is_printed(self):
        status, shown = self.exit_status_of("StopRequest().wait(90)", limit=1)

        assert status == EXIT_SILENT
        assert "silent" in shown
        assert "in wait" in shown

    def test_suspended_work_may_take_longer_than_the_limit(self):
        body = f"{MANUAL_CLOCK}\nwith dog.suspended():\n    now[0] += 90; stop.wait(1)"

        assert self.exit_status_of(body, limit=0.1)[0] == 0


class TestRunUntilSignalled:
    @pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
    def test_exception_of_the_work_is_raised(self, error):
        def work(stop):
            raise error("no")

        with pytest.raises(error, match="no"):
            run_until_signalled(work, grace=timedelta(seconds=1))

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_signal_asks_the_work_to_stop_and_the_previous_handler_is_restored(self, number):
        before = signal.getsignal(number)

        def work(stop):
            os.kill(os.getpid(), number)
            return stop.wait(60)

        assert run_until_signalled(work, grace=timedelta(seconds=60)) is True
        assert signal.getsignal(number) is before

    def test_work_runs_beside_the_main_thread(self):
        thread = run_until_signalled(lambda stop: threading.current_thread(), grace=timedelta(seconds=1))

        assert thread is not threading.main_thread()

    @pytest.mark.every_database
    @pytest.mark.django_db
    def test_work_runs_on_the_calling_thread_inside_the_transaction_of_a_test(self):
        assert connection.in_atomic_block

        thread = run_until_signalled(lambda stop: threading.current_thread(), grace=timedelta(seconds=1))

        assert thread is threading.current_thread()

    def test_work_that_does_not_stop_within_the_grace_is_ended_with_its_stack(self):
        program = (
            "import os, signal, threading; from datetime import timedelta\n"
            "from django.conf import settings; settings.configure()\n"
            "from exactly_once.process.main_thread import run_until_signalled\n"
            "def sleeping(stop):\n    os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait()\n"
            "run_until_signalled(sleeping, grace=timedelta(seconds=0.05))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)

        assert done.returncode == EXIT_SILENT
        assert "asked to stop 0.05 s ago and has not finished" in done.stderr
        assert "in sleeping" in done.stderr


SUSPENDING = (
    "import time; real, suspended = time.clock_gettime, [0.0]\n"
    "time.clock_gettime = lambda clock: real(clock) + (suspended[0] if clock == time.CLOCK_BOOTTIME else 0.0)\n"
)
"""A machine that can be suspended: its CLOCK_BOOTTIME goes on meanwhile and its CLOCK_MONOTONIC does not (clock_gettime(2))."""


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux has this clock")
class TestSuspendedMachine:
    def test_a_deadline_counts_the_time_in_which_the_machine_was_suspended(self):
        program = (
            f"{SUSPENDING}from exactly_once.process.clock import monotonic\n"
            "began_at = monotonic(); suspended[0] = 3600; print(int(monotonic() - began_at))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)

        assert done.stdout.strip() == "3600"

    @pytest.mark.long
    def test_the_watchdog_does_not_take_a_suspended_machine_for_a_silent_loop(self):
        program = (
            f"{SUSPENDING}from datetime import timedelta\n"
            "from exactly_once.process.loop import StopRequest, Watchdog\n"
            "stop = StopRequest(); dog = Watchdog(limit=timedelta(seconds=60))\n"
            "with dog.watching():\n"
            "    for _ in range(20):\n"
            "        dog.beat(); suspended[0] += 3600; stop.wait(0.05)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)

        assert done.returncode == 0, done.stderr


class TestBrokerUrl:
    def test_amqp_schemes_are_recognised(self):
        assert [broker.speaks_amqp(url) for url in ("amqp://h", "amqps://h", "pyamqp://h", "redis://h")] == [
            True,
            True,
            True,
            False,
        ]


def test_kombus_own_confirms_are_off_and_every_wait_is_bounded():
    options = broker.connection_options("amqp://h", on_blocked=print)

    assert options["transport_options"]["confirm_publish"] is False
    assert options["transport_options"]["on_blocked"] is print
    assert options["heartbeat"] > 0
    assert all(options["transport_options"][name] > 0 for name in ("read_timeout", "write_timeout"))


def test_an_error_is_described_in_one_line_that_is_never_empty():
    assert describe(OSError("cut\n  off")) == "cut off"
    assert describe(TimeoutError()) == "TimeoutError"


class TestConsole:
    @pytest.mark.parametrize(
        ("ago", "shown"),
        [
            (timedelta(seconds=1.5), "1.5 s"),
            (timedelta(minutes=3), "0:03:00"),
            (timedelta(days=2), "2 days, 0:00:00"),
            (-timedelta(minutes=3), "0.0 s"),
        ],
    )
    def test_an_age_is_shown_in_readable_units(self, ago, shown, monkeypatch):
        now = utcnow()
        monkeypatch.setattr(terminal, "utcnow", lambda: now)

        assert terminal.age(now - ago) == shown

    def test_the_age_of_no_instant_is_a_dash(self):
        assert terminal.age(None) == "-"

    @pytest.mark.parametrize(
        ("count", "shown"), [(0, "0 messages"), (1, "1 message"), (2, "2 messages"), (2000, "2,000 messages")]
    )
    def test_count_in_a_sentence_has_the_right_number(self, count, shown):
        assert ngettext("%(count)s message", "%(count)s messages", count) == shown

    def test_console_logging_is_set_up_once_unless_a_logger_already_has_a_handler(self, monkeypatch):
        names = ["exactly.once.test", "exactly.once.test.part"]
        monkeypatch.setattr(command, "our_apps", lambda: [SimpleNamespace(name=name) for name in names])
        logger, part = map(logging.getLogger, names)
        logger.propagate = False
        try:
            command.log_to_console(1)
            command.log_to_console(3)

            assert (len(logger.handlers), part.handlers) == (1, [])
            assert (logger.level, part.getEffectiveLevel()) == (logging.INFO, logging.INFO)
        finally:
            logger.handlers.clear()

"""Life signs: what a probe on the same host learns about a running, a frozen and a killed process."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest

from exactly_once.process import life_sign
from exactly_once.process.life_sign import giving_life_signs, life_signs
from exactly_once.process.loop import Watchdog
from tests.support import ROOT
from tests.support.threads import in_threads
from tests.support.waiting import wait_until

PROGRAM = """
import sys, time
from exactly_once.process.life_sign import giving_life_signs
with giving_life_signs("relay", 60.0) as sign:
    while True:
        sign.moved(0.0)
        time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def another_process(directory):
    environment = {**os.environ, "TMPDIR": str(directory)}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment)
    try:
        wait_until(lambda: life_signs("relay"))
        yield process
    finally:
        process.kill()
        process.wait()


def test_running_process_is_found_by_its_kind_and_its_file_is_deleted_at_its_end(temporary_directory):
    with giving_life_signs("relay", 60.0) as writer:
        writer.moved(2.0)
        [sign] = life_signs("relay")
        assert life_signs("consumer") == []

    assert sign.pid == os.getpid()
    assert 2.0 <= sign.silent_seconds < 30.0
    assert sign.is_alive
    assert life_signs("relay") == []
    assert list(temporary_directory.rglob("relay-*")) == []


def test_probe_that_reads_before_the_file_is_locked_does_not_delete_it(monkeypatch):
    lock = fcntl.flock

    def lock_after_a_probe(descriptor, operation):
        if operation & fcntl.LOCK_EX:
            assert life_signs("relay") == []
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_a_probe)
    with giving_life_signs("relay", 60.0):
        assert [sign.pid for sign in life_signs("relay")] == [os.getpid()]


def test_frozen_process_is_found_and_its_silence_grows(temporary_directory):
    with another_process(temporary_directory) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: life_signs("relay")[0].silent_seconds > 0.5)

        assert [sign.pid for sign in life_signs("relay")] == [process.pid]


def test_watchdog_reports_the_slowest_of_its_loops(monkeypatch):
    watchdog = Watchdog(limit=timedelta(seconds=1), kind="relay")
    ended = threading.Event()

    def silent_loop():
        watchdog.beat()
        ended.wait()

    def slowest():
        watchdog.beat()
        return life_signs("relay")[0].silent_seconds > 1.0

    monkeypatch.setattr("exactly_once.process.loop.end_process", lambda reason: None)
    with watchdog.watching(), in_threads(silent_loop, stop=ended):
        wait_until(slowest)
        assert not life_signs("relay")[0].is_alive


def test_directory_of_another_user_is_not_used_and_the_process_runs_on(temporary_directory, monkeypatch, caplog):
    (temporary_directory / "elsewhere").mkdir()
    (temporary_directory / f"django-exactly-once-{os.getuid()}").symlink_to(temporary_directory / "elsewhere")

    with giving_life_signs("relay", 60.0) as writer:
        writer.moved(0.0)

    assert "gives no life sign" in caplog.text
    assert list((temporary_directory / "elsewhere").iterdir()) == []


def test_process_without_any_temporary_directory_runs_on_and_says_so_once(monkeypatch, caplog):
    def no_directory():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/']")

    monkeypatch.setattr(tempfile, "gettempdir", no_directory)

    with giving_life_signs("relay", 60.0) as writer:
        writer.moved(0.0)
        writer.moved(0.0)
        assert life_signs("relay") == []

    [record] = caplog.records
    assert "gives no life sign" in record.getMessage()
    assert "No usable temporary directory" in record.getMessage()


def test_damaged_file_is_passed_over(temporary_directory):
    with giving_life_signs("relay", 60.0):
        [path] = life_sign._directory().iterdir()
        path.write_bytes(b"{")

        assert life_signs("relay") == []

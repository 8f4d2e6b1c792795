"""The private servers of the test suite: nothing of them outlives its owner."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.servers import PostgresServer, watcher
from tests.support.waiting import A_WHILE, wait_until

SEGMENTS = Path("/proc/sysvipc/shm")


def test_closing_a_killed_server_leaves_no_shared_memory_behind():
    server = PostgresServer().start()
    mapped = Path(f"/proc/{server.pid}/maps").read_text()
    files = {Path(name) for name in re.findall(r"/dev/shm/PostgreSQL\.\d+", mapped)}
    # The seventh line: the key and the number of the segment that shows whether a former server still runs.
    segment = (server.directory / "data" / "postmaster.pid").read_text().splitlines()[6].split()[1]
    assert files
    assert segment in segments()

    server.kill()
    server.close()

    assert [file for file in files if file.exists()] == []
    assert segment not in segments()


class TestOwnership:
    @pytest.mark.parametrize("kind", ["server", "process in a fresh interpreter"])
    def test_what_a_process_has_started_ends_when_that_is_killed(self, tmp_path, kind):
        """A process in a fresh interpreter has no keeper, as a forked one has."""
        program = "from tests.support.servers import RedisServer; r = RedisServer().start(); print(r.pid, flush=True); input()"
        if kind != "server":
            program = (
                "import os, pathlib; from tests.support.processes import start;"
                "environment = {**os.environ, 'DJANGO_SETTINGS_MODULE': 'demo_shop.settings'};"
                "waiting = ['timeit', '--number', '1', 'import time; time.sleep(600)'];"
                f"p = start(waiting, environment=environment, log=pathlib.Path({str(tmp_path / 'log')!r}));"
                "print(p.pid, flush=True); input()"
            )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True, **pipes) as owner:
            try:
                started = int(owner.stdout.readline())
                assert watcher.is_alive(started)
            finally:
                os.kill(owner.pid, signal.SIGKILL)

            wait_until(lambda: not watcher.is_alive(started))

    def test_watcher_that_starts_after_its_owner_died_still_ends_the_server(self):
        no_process = 2**22 + 1  # more than the kernel gives out
        heard, said = os.pipe()
        with subprocess.Popen(["sleep", "600"]) as orphan:
            try:
                os.write(said, json.dumps({"do": "watch", "pid": orphan.pid, "ask_with": int(signal.SIGTERM)}).encode() + b"\n")
                # The pipe stays open, as a forked child of the owner may have it.
                subprocess.run(
                    [sys.executable, "-I", "-S", watcher.__file__, str(no_process)], stdin=heard, timeout=A_WHILE, check=True
                )
                assert orphan.wait(A_WHILE) == -signal.SIGTERM
            finally:
                os.close(heard)
                os.close(said)
                orphan.kill()

    def test_module_prints_the_server_urls_as_shell_exports(self):
        with subprocess.Popen([sys.executable, "-m", "tests.support.servers"], stdout=subprocess.PIPE, text=True) as servers:
            try:
                lines = [servers.stdout.readline() for _ in range(3)]
                servers.terminate()
                assert servers.wait(A_WHILE) == 0
            finally:
                servers.kill()

        assert [line.split("=")[0] for line in lines] == ["export DATABASE_URL", "export BROKER_URL", "export REDIS_URL"]


def segments():
    return [line.split()[1] for line in SEGMENTS.read_text().splitlines()]

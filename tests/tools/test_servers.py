"""The private servers of the test suite: they serve, they can be killed, and they keep what they confirmed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import kombu
import psycopg
import pytest

from tests.support import ROOT
from tests.support.servers import FaultProxy, PostgresServer, ServerFailed, watcher
from tests.support.waiting import A_WHILE, wait_until

A_MOMENT = 0.3
SEGMENTS = Path("/proc/sysvipc/shm")


class TestPostgres:
    def test_a_kill_leaves_no_backend_behind(self, mortal_postgres):
        with psycopg.connect(mortal_postgres.url) as connection:
            assert connection.execute("SHOW fsync").fetchone() == ("on",)
            backend = connection.info.backend_pid

            mortal_postgres.kill()

            assert not watcher.is_alive(backend)
            connection.close()

    def test_closing_a_killed_server_leaves_no_shared_memory_behind(self):
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


class TestRabbit:
    def test_killed_broker_does_not_answer(self, mortal_rabbitmq, rabbitmq_url):
        with pytest.raises(ServerFailed, match="no_such_function"):
            mortal_rabbitmq.evaluate("rabbit:no_such_function().")
        mortal_rabbitmq.kill()

        with pytest.raises(kombu.exceptions.OperationalError, match="refused"):
            declare(rabbitmq_url, "orders")

    @pytest.mark.parametrize("kind", ["classic", "quorum"])
    def test_queue_length_counts_unacknowledged_messages(self, rabbitmq_server, rabbitmq_url, kind):
        declare(rabbitmq_url, "orders", kind)
        put(rabbitmq_url, "orders", "first")
        put(rabbitmq_url, "orders", "second")

        with a_channel(rabbitmq_url) as channel:
            message = kombu.Queue("orders")(channel).get()
            assert rabbitmq_server.queue_lengths(rabbitmq_url) == {"orders": 2}
            message.ack()
            wait_until(lambda: rabbitmq_server.queue_lengths(rabbitmq_url) == {"orders": 1})


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


class TestProxy:
    def test_cut_resets_open_connections_and_accepts_new_ones_and_refuse_rejects_these_until_accept(self, echo):
        with a_client(echo.proxy) as client:
            echoed(client, b"hello")
            echo.proxy.cut()
            with pytest.raises(ConnectionResetError):
                client.recv(1)

        with a_client(echo.proxy) as old:
            assert echoed(old, b"again") == b"again"
            echo.proxy.refuse()
            with pytest.raises(ConnectionRefusedError):
                a_client(echo.proxy)
            assert echoed(old, b"still") == b"still"

        echo.proxy.accept()
        with a_client(echo.proxy) as new:
            assert echoed(new, b"again") == b"again"

    def test_freeze_accepts_everything_and_forwards_nothing_until_thaw(self, echo):
        with a_client(echo.proxy) as old:
            echoed(old, b"hello")
            echo.proxy.freeze()
            with a_client(echo.proxy) as new:
                for client in (old, new):
                    client.sendall(b"anybody?")
                    client.settimeout(A_MOMENT)
                    with pytest.raises(TimeoutError):
                        client.recv(1)

                echo.proxy.thaw()
                for client in (old, new):
                    client.settimeout(A_WHILE)
                    assert client.recv(100) == b"anybody?"

    def test_drop_server_to_client_forwards_requests_and_drops_answers(self, echo):
        with a_client(echo.proxy) as client:
            echo.proxy.drop_server_to_client()
            client.sendall(b"lost")
            wait_until(lambda: echo.received == b"lost")
            client.settimeout(A_MOMENT)
            with pytest.raises(TimeoutError):
                client.recv(1)

    def test_cut_after_forwards_exactly_that_many_bytes(self, echo):
        echo.proxy.cut_after(3)
        with a_client(echo.proxy) as client:
            client.sendall(b"abcdef")
            wait_until(lambda: echo.proxy.connections == 0)

        wait_until(lambda: echo.received == b"abc")
        with a_client(echo.proxy) as client:
            assert echoed(client, b"again") == b"again"


def segments():
    return [line.split()[1] for line in SEGMENTS.read_text().splitlines()]


class Echo:
    """A server that sends back all it receives, behind a proxy."""

    def __init__(self):
        self.received = b""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.proxy = FaultProxy("127.0.0.1", self.listener.getsockname()[1])

    def serve(self):
        def talk(connection):
            with connection:
                try:
                    while chunk := connection.recv(65536):
                        self.received += chunk
                        connection.sendall(chunk)
                except OSError:
                    pass

        def accept():
            while True:
                try:
                    connection, _ = self.listener.accept()
                except OSError:
                    return
                threading.Thread(target=talk, args=[connection], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()


@pytest.fixture
def echo():
    server = Echo()
    server.serve()
    yield server
    server.proxy.stop()
    server.listener.shutdown(socket.SHUT_RDWR)
    server.listener.close()


def a_client(proxy):
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=A_WHILE)


def echoed(client, words):
    client.sendall(words)
    return client.recv(65536)


@contextmanager
def a_channel(url):
    with kombu.Connection(url) as connection:
        yield connection.default_channel


def declare(url, name, kind="classic"):
    with a_channel(url) as channel:
        kombu.Queue(name, durable=True, queue_arguments={"x-queue-type": kind})(channel).declare()


def put(url, name, body):
    with kombu.Connection(url, transport_options={"confirm_publish": True}) as connection:
        connection.Producer().publish(body, routing_key=name, delivery_mode=2)

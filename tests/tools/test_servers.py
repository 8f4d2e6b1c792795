"""The private servers of the test suite: they serve, they can be killed, and they keep what they confirmed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import amqp
import kombu
import psycopg
import pytest
import redis

from tests.support import ROOT
from tests.support.servers import FaultProxy, PostgresServer, RabbitServer, ServerFailed, ServerUnavailable, binaries, watcher
from tests.support.waiting import A_WHILE, wait_until

A_MOMENT = 0.3
SEGMENTS = Path("/proc/sysvipc/shm")


class TestPostgres:
    def test_committed_rows_survive_a_kill(self, mortal_postgres):
        url = mortal_postgres.create_database()
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE kept (id int)")
            connection.execute("INSERT INTO kept VALUES (7)")

        mortal_postgres.kill()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(url)
        mortal_postgres.start()

        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT id FROM kept").fetchall() == [(7,)]

    def test_a_kill_leaves_no_backend_behind(self, mortal_postgres):
        with psycopg.connect(mortal_postgres.url) as connection:
            backend = connection.info.backend_pid

            mortal_postgres.kill()

            assert not watcher.is_alive(backend)
            connection.close()

    @pytest.mark.skipif(not SEGMENTS.exists(), reason="only Linux lists shared memory in /proc")
    def test_client_that_kills_a_server_as_soon_as_it_is_served_does_not_make_its_start_fail(
        self, mortal_postgres, monkeypatch
    ):
        mortal_postgres.kill()
        answers, killing = mortal_postgres._answers, threading.Thread(target=mortal_postgres.kill)

        def served_before_start_has_seen_it():
            if not killing.ident and answers():
                killing.start()
                killing.join(0.2)
                return False
            return answers()

        monkeypatch.setattr(mortal_postgres, "_answers", served_before_start_has_seen_it)
        mortal_postgres.start()
        killing.join()

        assert not mortal_postgres.is_running

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

    def test_fsync_is_on_and_200_connections_are_allowed(self, mortal_postgres):
        with psycopg.connect(mortal_postgres.url) as connection:
            assert connection.execute("SHOW fsync").fetchone() == ("on",)
            assert connection.execute("SHOW max_connections").fetchone() == ("200",)

    def test_dropped_database_does_not_exist(self, mortal_postgres):
        url = mortal_postgres.create_database("short_lived")

        mortal_postgres.drop_database("short_lived")

        with pytest.raises(psycopg.OperationalError, match="does not exist"):
            psycopg.connect(url)

    def test_a_server_that_cannot_start_shows_its_log(self, mortal_postgres):
        mortal_postgres.stop()
        with closing(socket.create_server(("127.0.0.1", mortal_postgres.port))), pytest.raises(ServerFailed) as failed:
            mortal_postgres.start()

        assert "--- log" in str(failed.value)
        assert "could not bind" in str(failed.value)


class TestRabbit:
    def test_a_persistent_message_survives_a_kill(self, rabbitmq_server, rabbitmq_url):
        declare(rabbitmq_url, "orders")
        put(rabbitmq_url, "orders", "an order")

        rabbitmq_server.kill()
        rabbitmq_server.start()

        assert take(rabbitmq_url, "orders") == "an order"

    def test_virtual_hosts_have_separate_queues_and_can_be_deleted(self, rabbitmq_server, rabbitmq_url):
        declare(rabbitmq_url, "orders")
        put(rabbitmq_url, "orders", "an order")
        elsewhere = rabbitmq_server.new_vhost()

        assert rabbitmq_server.queue_lengths(rabbitmq_url) == {"orders": 1}
        assert rabbitmq_server.queue_lengths(elsewhere) == {}

        rabbitmq_server.delete_vhost(elsewhere)
        with pytest.raises(amqp.NotAllowed), kombu.Connection(elsewhere) as connection:
            connection.connect()

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

    def test_rabbitmqctl_speaks_to_this_node(self, rabbitmq_server, rabbitmq_url):
        vhost = rabbitmq_url.rpartition("/")[2]

        assert vhost in rabbitmq_server.ctl("list_vhosts", "--quiet")

    def test_error_raised_inside_the_broker_is_in_the_exception(self, rabbitmq_server):
        with pytest.raises(ServerFailed, match="no_such_function"):
            rabbitmq_server.start().evaluate("rabbit:no_such_function().")


class TestRedis:
    def test_confirmed_write_survives_a_kill(self, redis_server, redis_url):
        with redis.Redis.from_url(redis_url) as client:
            client.set("kept", "7")

        redis_server.kill()
        redis_server.start()

        with redis.Redis.from_url(redis_url) as client:
            assert client.get("kept") == b"7"

    def test_redis_url_fixture_empties_the_database(self, redis_server, request):
        with redis.Redis.from_url(redis_server.start().url) as client:
            client.set("left", "behind")

            assert request.getfixturevalue("redis_url") == redis_server.url
            assert client.dbsize() == 0


class TestOwnership:
    def test_server_ends_when_the_process_that_started_it_is_killed(self):
        program = "from tests.support.servers import RedisServer; r = RedisServer().start(); print(r.pid, flush=True); input()"
        with subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as owner:
            try:
                server = int(owner.stdout.readline())
                assert watcher.is_alive(server)
            finally:
                os.kill(owner.pid, signal.SIGKILL)

            wait_until(lambda: not watcher.is_alive(server))

    def test_process_in_a_fresh_interpreter_ends_when_the_process_that_started_it_is_killed(self, tmp_path):
        """Such a process has no keeper, as a forked one has."""
        program = (
            "import os, pathlib; from tests.support.processes import start;"
            "environment = {**os.environ, 'DJANGO_SETTINGS_MODULE': 'demo_shop.settings'};"
            "waiting = ['timeit', '--number', '1', 'import time; time.sleep(600)'];"
            f"p = start(waiting, environment=environment, log=pathlib.Path({str(tmp_path / 'log')!r}));"
            "print(p.pid, flush=True); input()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as owner:
            try:
                process = int(owner.stdout.readline())
                assert watcher.is_alive(process)
            finally:
                os.kill(owner.pid, signal.SIGKILL)

            wait_until(lambda: not watcher.is_alive(process))

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

        assert [line.split("=")[0] for line in lines] == [
            "export DATABASE_URL",
            "export BROKER_URL",
            "export REDIS_URL",
        ]

    def test_server_that_cannot_be_installed_raises_with_the_install_command(self, monkeypatch):
        monkeypatch.setattr(binaries, "_rabbit_on_the_machine", lambda: None)
        monkeypatch.setattr(binaries, "_apt_install", lambda package: None)

        with pytest.raises(ServerUnavailable, match="apt-get install rabbitmq-server"):
            RabbitServer().start()


class TestProxy:
    def test_proxy_forwards_both_ways(self, echo):
        with a_client(echo.proxy) as client:
            assert echoed(client, b"hello") == b"hello"

        wait_until(lambda: (echo.proxy.bytes_to_server, echo.proxy.bytes_to_client) == (5, 5))

    def test_cut_resets_open_connections_and_accepts_new_ones(self, echo):
        with a_client(echo.proxy) as client:
            echoed(client, b"hello")
            echo.proxy.cut()
            with pytest.raises(ConnectionResetError):
                client.recv(1)

        with a_client(echo.proxy) as client:
            assert echoed(client, b"again") == b"again"

    def test_refuse_rejects_new_connections_until_accept(self, echo):
        with a_client(echo.proxy) as old:
            echoed(old, b"hello")
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

    def test_delay_applies_in_both_directions(self, echo):
        with a_client(echo.proxy) as client:
            echo.proxy.delay(A_MOMENT)
            began_at = time.monotonic()
            echoed(client, b"hello")

            assert time.monotonic() - began_at >= 2 * A_MOMENT

    def test_drop_server_to_client_forwards_requests_and_drops_answers(self, echo):
        with a_client(echo.proxy) as client:
            echo.proxy.drop_server_to_client(True)
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

    def test_large_stream_arrives_complete(self, echo):
        sent = os.urandom(1 << 20)
        with a_client(echo.proxy) as client:
            client.sendall(sent)
            received = b""
            while len(received) < len(sent):
                received += client.recv(65536)

        assert received == sent

    def test_unreachable_server_resets_the_client(self):
        with closing(socket.create_server(("127.0.0.1", 0))) as closed:
            port = closed.getsockname()[1]
        with FaultProxy("127.0.0.1", port) as proxy, pytest.raises(ConnectionResetError), a_client(proxy) as client:
            client.recv(1)

    def test_stopped_proxy_refuses_connections(self, echo):
        echo.proxy.stop()

        with pytest.raises(ConnectionRefusedError):
            a_client(echo.proxy)

    def test_through_replaces_the_port_of_a_url(self, echo):
        through = echo.proxy.through("amqp://guest:guest@127.0.0.1:5672/test")

        assert through == f"amqp://guest:guest@127.0.0.1:{echo.proxy.port}/test"


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


def take(url, name):
    with a_channel(url) as channel:
        message = kombu.Queue(name)(channel).get()
        message.ack()
        return message.payload

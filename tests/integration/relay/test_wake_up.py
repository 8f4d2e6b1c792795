"""The doorbell: one NOTIFY after a commit with work for the relays, heard also after outages of the listening connection."""

import logging
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import psycopg
import pytest
from django.db import connection, connections, transaction

from exactly_once.process.loop import Bell, StopRequest
from exactly_once.wire.retry import Pause
from outbox import doorbell
from outbox.conf import OutboxOptions
from outbox.doorbell import CHANNEL, ring_after_commit
from outbox.relay import listening
from outbox.relay.listening import APPLICATION_NAME, Listener
from tests.support.aliases import an_alias, the_default_at
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import at_once
from tests.support.relaying import SECONDS, in_threads
from tests.support.servers import FaultProxy
from tests.support.sql import another_session, executed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

AWAY, BACK = "The doorbell is unavailable", "The doorbell is available again"


@pytest.fixture(autouse=True)
def no_earlier_ring():
    """No ring of this test is withheld because of an earlier test, and no listener of an earlier test runs."""
    wait_until(lambda: not a_listener_runs())
    doorbell._ring_of.cache_clear()
    yield
    doorbell._ring_of.cache_clear()


def a_listener_runs():
    return "doorbell" in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def outside():
    with another_session(autocommit=True) as outside:
        # An earlier test's backend ends a moment after its connection.
        wait_until(lambda: not listening_backends(outside))
        yield outside


@pytest.fixture
def heard(outside):
    """The payloads of the notifications since the last call."""
    outside.execute(f"LISTEN {CHANNEL}")

    def heard():
        # Notifications committed before this round trip are delivered with it.
        outside.execute("SELECT 1")
        return [notify.payload for notify in outside.notifies(timeout=0)]

    return heard


def ring_and_roll_back():
    with suppress(ZeroDivisionError), transaction.atomic():
        ring_after_commit("default")
        raise ZeroDivisionError


class TestRinging:
    def test_transaction_with_a_thousand_messages_rings_once_after_its_commit(self, heard):
        with transaction.atomic():
            for n in range(1000):
                ring_after_commit("default")
                if n % 100 == 0:
                    transaction.on_commit(lambda: None)
            hooks = len(connection.run_on_commit)
            assert heard() == []

        assert hooks == 11
        assert heard() == [""]

    def test_rolled_back_transaction_or_savepoint_does_not_ring_and_a_later_publish_does(self, heard):
        ring_and_roll_back()
        with transaction.atomic():
            ring_and_roll_back()
        assert heard() == []
        with transaction.atomic():
            ring_and_roll_back()
            ring_after_commit("default")

        assert heard() == [""]

    def test_burst_of_transactions_in_five_threads_rings_at_most_once_per_thread(self, heard, monkeypatch):
        clock = SimpleNamespace(now=1000.0)
        monkeypatch.setattr(doorbell, "monotonic", lambda: clock.now)
        # On a busy machine a NOTIFY may hold the lock for longer, and a failed ring is followed by a pause.
        monkeypatch.setattr(doorbell, "_NOTIFY", doorbell._NOTIFY.replace(doorbell._LONGEST_WAIT, f"{SECONDS:.0f}s"))

        def burst():
            for _ in range(20):
                with transaction.atomic():
                    ring_after_commit("default")

        at_once([burst] * 5)
        assert 1 <= len(heard()) <= 5, "one, unless threads came to it together"

        clock.now += 0.051
        burst()
        assert heard() == [""]

    def test_alert_time_of_a_relay_is_at_least_twice_the_quiet_time_of_a_publisher(self):
        assert doorbell.ALERT_SECONDS >= 2 * doorbell._QUIET_SECONDS

    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_ring_of_one_database_is_not_heard_on_another(self, heard):
        with another_session("other", autocommit=True) as other:
            other.execute(f"LISTEN {CHANNEL}")
            with transaction.atomic(using="other"):
                ring_after_commit("other")

            assert [notify.payload for notify in other.notifies(timeout=SECONDS, stop_after=1)] == [""]
        assert heard() == []

    def test_publisher_with_doorbell_false_does_not_ring(self, heard, settings):
        settings.OUTBOX = {"LISTEN_ALIAS": None}
        with transaction.atomic():
            ring_after_commit("default")
            assert connection.run_on_commit == []

        assert heard() == []

    def test_ring_does_not_count_as_a_query_of_the_caller(self, heard, django_assert_num_queries):
        def refuse(*args):
            raise AssertionError("a query of the caller's")

        # BEGIN and COMMIT.
        with django_assert_num_queries(2), connection.execute_wrapper(refuse), transaction.atomic():
            ring_after_commit("default")

        assert heard() == [""]

    def test_ring_flushes_no_wal(self, outside):
        """A ring that had to be flushed or replicated would hold the cluster's lock for that long."""

        def flushed():
            return outside.execute("SELECT pg_current_wal_flush_lsn()").fetchone()

        def ring_unflushed():
            before = flushed()
            with transaction.atomic():
                ring_after_commit("default")
            return flushed() == before

        # The server's own processes flush now and then, but not at every ring.
        assert any(ring_unflushed() for _ in range(20))

    def test_commit_stands_when_the_connection_dies_before_the_ring(self, outside, caplog):
        caplog.set_level(logging.INFO, "outbox.doorbell")

        def die():
            backend = connection.connection.info.backend_pid
            outside.execute("SELECT pg_terminate_backend(%s)", [backend])
            wait_until(lambda: not outside.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [backend]).fetchall())

        with transaction.atomic():
            Effect.objects.create(name="stands")
            transaction.on_commit(die)
            ring_after_commit("default")

        assert "was not rung" in caplog.text
        assert connection.errors_occurred, "Django looks at the connection before it uses it again"
        connection.close()
        assert Effect.objects.filter(name="stands").exists()

    def test_ring_opens_no_connection(self, heard, caplog):
        with transaction.atomic():
            transaction.on_commit(connection.close)
            ring_after_commit("default")

        assert connection.connection is None
        assert heard() == []
        assert caplog.records == []

    def test_ring_is_not_sent_inside_a_transaction_that_an_earlier_hook_began(self, heard):
        with transaction.atomic():
            transaction.on_commit(lambda: connection.set_autocommit(False))
            ring_after_commit("default")
        connection.commit()  # a rollback would discard a NOTIFY
        connection.set_autocommit(True)

        assert heard() == []


@pytest.mark.django_db
def test_commit_hook_of_the_ring_is_not_captured_by_a_testcase(django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks() as callbacks, transaction.atomic():
        ring_after_commit("default")

    assert callbacks == []


@contextmanager
def foreign_notify_in_a_long_commit(server):
    """PostgreSQL has one lock for all notifying transactions; one whose commit waits for a standby keeps it meanwhile."""
    with psycopg.connect(server.url, autocommit=True) as superuser, psycopg.connect(server.url, autocommit=True) as stranger:
        superuser.execute("CREATE TABLE IF NOT EXISTS strangers (n int)")
        superuser.execute("ALTER SYSTEM SET synchronous_standby_names = 'a_standby_that_is_not_there'")
        superuser.execute("SELECT pg_reload_conf()")
        wait_until(lambda: superuser.execute("SHOW synchronous_standby_names").fetchone() != ("",))
        pid = stranger.info.backend_pid
        waits = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event = 'SyncRep'"
        ended = threading.Event()

        def notify():
            # The server waits for a standby only from when its checkpointer has read the configuration.
            while not ended.is_set():
                stranger.execute("BEGIN; INSERT INTO strangers VALUES (1); NOTIFY strangers; COMMIT")

        with in_threads(notify):
            try:
                wait_until(lambda: superuser.execute(waits, [pid]).fetchone() is not None)
                yield
            finally:
                ended.set()
                superuser.execute("ALTER SYSTEM RESET synchronous_standby_names")
                superuser.execute("SELECT pg_reload_conf()")


def test_foreign_notify_in_a_long_commit_does_not_delay_publishers(mortal_postgres, monkeypatch, caplog):
    monkeypatch.setattr(doorbell, "_AFTER_FAILURE_SECONDS", SECONDS)
    caplog.set_level(logging.INFO, "outbox.doorbell")
    with the_default_at(NAME="test", PORT=mortal_postgres.port):
        with foreign_notify_in_a_long_commit(mortal_postgres):
            for _ in range(10):
                with transaction.atomic():
                    ring_after_commit("default")

        assert caplog.text.count("was not rung") == 1, "one tries, and the others do not wait too"
        assert "lock timeout" in caplog.text
        assert executed("SHOW lock_timeout") == [("0",)], "nothing is left on the connection"


@pytest.mark.every_database
class TestInThisProcess:
    def test_every_commit_and_nothing_before_it_wakes_the_relays_in_the_same_process(self, bell, never):
        other = Bell()
        with doorbell.heard_in_this_process("default", [bell]):
            for _ in range(3):
                with doorbell.heard_in_this_process("default", [other]), transaction.atomic():
                    ring_after_commit("default")
                    assert not bell.wait(0, never)
                assert bell.wait(SECONDS, never)
                assert other.wait(SECONDS, never)
            with transaction.atomic():
                ring_after_commit("default")

        assert bell.wait(SECONDS, never)
        assert not other.wait(0, never), "it was removed"
        assert not doorbell._in_this_process


@contextmanager
def a_listener(*bells, alias="default", **options):
    """A listener that listens, after the ring with which it begins."""
    options = OutboxOptions(**options)
    listener = Listener(alias, bells, options)
    with listener.listening():
        for bell in bells:
            assert bell.wait(SECONDS, StopRequest())
        yield listener


def notify(outside):
    outside.execute(f"NOTIFY {CHANNEL}")


def listening_backends(outside):
    found = outside.execute("SELECT pid FROM pg_stat_activity WHERE application_name = %s", [APPLICATION_NAME]).fetchall()
    return [pid for (pid,) in found]


@pytest.fixture
def quick_reconnects(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(Pause, "next_seconds", lambda pause: 0.01)


@pytest.mark.usefixtures("quick_reconnects")
class TestListening:
    def test_listener_hears_fifty_notifications_in_turn_and_rings_every_bell(self, outside, never, monkeypatch):
        monkeypatch.setattr(listening, "_PULSE_SECONDS", 10 * SECONDS)
        bells = Bell(), Bell()
        with a_listener(*bells):
            for _ in range(50):
                notify(outside)
                assert all(bell.wait(SECONDS, never) for bell in bells)
            assert len(listening_backends(outside)) == 1

        wait_until(lambda: not listening_backends(outside))
        wait_until(lambda: not a_listener_runs())

    def test_listener_whose_backend_is_terminated_reconnects_and_rings_once(self, outside, bell, never, caplog):
        with a_listener(bell):
            [backend] = listening_backends(outside)
            outside.execute("SELECT pg_terminate_backend(%s)", [backend])

            assert bell.wait(SECONDS, never), "once, when it listens again"
            assert listening_backends(outside) != [backend]
            notify(outside)
            assert bell.wait(SECONDS, never)

        assert (caplog.text.count(AWAY), caplog.text.count(BACK)) == (1, 1)

    def test_listener_with_doorbell_false_does_not_connect(self, outside, bell, never):
        with Listener("default", [bell], OutboxOptions(LISTEN_ALIAS=None)).listening():
            assert not a_listener_runs()
            assert listening_backends(outside) == []
            assert not doorbell._in_this_process


@pytest.mark.usefixtures("quick_reconnects")
class TestListenerOutage:
    @pytest.fixture
    def proxy(self):
        with FaultProxy("127.0.0.1", int(connection.settings_dict["PORT"])) as proxy, an_alias("through", PORT=proxy.port):
            yield proxy

    def test_listener_waits_for_an_unavailable_server_and_logs_it_once(self, proxy, outside, bell, never, caplog):
        proxy.refuse()
        with Listener("default", [bell], OutboxOptions(LISTEN_ALIAS="through")).listening():
            wait_until(lambda: AWAY in caplog.text)
            assert not bell.is_connected
            proxy.accept()
            assert bell.wait(SECONDS, never)
            assert bell.is_connected
            notify(outside)
            assert bell.wait(SECONDS, never)
            assert (caplog.text.count(AWAY), caplog.text.count(BACK)) == (1, 1)
            proxy.refuse()
            proxy.cut()
            wait_until(lambda: not bell.is_connected)

    def test_listener_detects_a_connection_without_answers(self, proxy, outside, bell, never, monkeypatch, caplog):
        """A frozen network: neither an error nor an answer."""
        monkeypatch.setattr(listening, "_PULSE_SECONDS", 0.05)
        monkeypatch.setattr(listening, "_ANSWER_SECONDS", 0.05)
        with a_listener(bell, LISTEN_ALIAS="through"):
            proxy.freeze()
            wait_until(lambda: "no answer" in caplog.text)
            proxy.thaw()
            assert bell.wait(SECONDS, never)
            notify(outside)
            assert bell.wait(SECONDS, never)

    def test_listener_probes_a_quiet_connection_and_keeps_it(self, proxy, outside, bell, never, monkeypatch, caplog):
        monkeypatch.setattr(listening, "_PULSE_SECONDS", 0.05)
        with a_listener(bell, LISTEN_ALIAS="through"):
            backends, before = listening_backends(outside), proxy.bytes_to_client
            wait_until(lambda: proxy.bytes_to_client > before + 200)

            assert listening_backends(outside) == backends
            assert not bell.wait(0, never), "an answer to the probe is not a ring"
        assert caplog.records == []

    def test_listener_refused_by_its_server_ends_when_asked(self, proxy, bell, monkeypatch, caplog):
        monkeypatch.setattr(Pause, "next_seconds", lambda pause: 10 * SECONDS)
        proxy.refuse()
        with Listener("default", [bell], OutboxOptions(LISTEN_ALIAS="through")).listening():
            wait_until(lambda: AWAY in caplog.text)

        wait_until(lambda: not a_listener_runs())

    def test_listener_that_waits_for_a_frozen_server_does_not_hold_up_the_end(self, proxy, bell, monkeypatch):
        monkeypatch.setattr(listening, "_LONGEST_GOODBYE_SECONDS", 0.05)
        monkeypatch.setitem(listening.TIMEOUTS, "connect_timeout", 10 * int(SECONDS))
        proxy.freeze()
        with Listener("default", [bell], OutboxOptions(LISTEN_ALIAS="through")).listening():
            wait_until(lambda: proxy.connections)

        assert a_listener_runs(), "the block has ended before its connection attempt"
        proxy.cut()
        proxy.thaw()
        wait_until(lambda: not a_listener_runs())

    def test_listener_survives_an_unexpected_error(self, bell, never, monkeypatch, caplog):
        wrapper, asked = type(connections["default"]), []
        original = wrapper.get_connection_params

        def fails_once(self):
            asked.append(1)
            if len(asked) == 1:
                raise RuntimeError("the password store is closed")
            return original(self)

        monkeypatch.setattr(wrapper, "get_connection_params", fails_once)
        with Listener("default", [bell], OutboxOptions()).listening():
            assert bell.wait(SECONDS, never)

        assert "the password store is closed" in caplog.text


class TestWithoutListen:
    @pytest.mark.every_database
    def test_listener_hears_its_own_process_on_every_database(self, bell, never):
        with Listener("default", [bell], OutboxOptions()).listening():
            if connection.vendor == "postgresql":
                assert bell.wait(SECONDS, never)
            with transaction.atomic():
                ring_after_commit("default")

            assert bell.wait(SECONDS, never)

    def test_psycopg2_is_logged_and_not_listened_with(self, bell, monkeypatch, caplog):
        caplog.set_level(logging.INFO, "outbox")
        monkeypatch.setattr(connection, "Database", SimpleNamespace(__name__="psycopg2"))
        with Listener("default", [bell], OutboxOptions()).listening():
            assert not a_listener_runs()

        assert "LISTEN needs psycopg 3" in caplog.text

    def test_listener_takes_no_connection_from_the_pool(self, bell, outside):
        """The pool would end the connection, and with it the LISTEN, at the end of its lifetime."""
        options = {"pool": {"min_size": 0, "max_size": 1}}
        with an_alias("pooled", OPTIONS=options, CONN_MAX_AGE=0), a_listener(bell, LISTEN_ALIAS="pooled"):
            assert len(listening_backends(outside)) == 1
            assert "pooled" not in connections["pooled"]._connection_pools


def test_unknown_listen_alias_raises_and_lists_the_known_ones():
    with pytest.raises(ValueError, match="LISTEN_ALIAS is 'direkt', and DATABASES has: default, other"):
        OutboxOptions(LISTEN_ALIAS="direkt")

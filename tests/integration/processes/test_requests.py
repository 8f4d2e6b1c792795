"""An operator pauses, resumes, drains and stops processes through their heartbeat rows."""

from datetime import timedelta

import pytest
from django.core.management import CommandError
from django.urls import reverse

from exactly_once.models import AuditEntry
from exactly_once.models import Process as ProcessRow
from exactly_once.process.loop import Mode, Request
from inbox.store.handler_rows import consumers
from outbox.models import OutboxMessage
from outbox.relay.heartbeat import relays
from outbox.states import State
from tests.support.admin_pages import Page, superuser_client
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB
from tests.support.commands import output_of
from tests.support.heartbeats import a_consumer, a_relay, let_consumers_fall_silent
from tests.support.relaying import published
from tests.support.workers import OF_THE_WORKERS, send

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def states():
    return set(OutboxMessage.objects.values_list("state", flat=True))


@pytest.mark.every_database
def test_process_that_was_asked_to_stop_and_was_killed_has_stopped_and_is_forgotten_after_an_hour():
    a_consumer(mode=Mode.STOPPING, silent_for=timedelta(minutes=2))

    (row,) = consumers.known("default")
    assert (row.has_stopped, row.silent) == (True, False)
    assert not consumers.rows("default")
    assert "killed 0:02:00 ago, because it did not end in time" in output_of("exactly_once_processes")
    page = Page(superuser_client().get(reverse("admin:exactly_once_process_changelist")))
    assert "Stopped" in page.text
    assert "Silent" not in page.text

    let_consumers_fall_silent(timedelta(hours=2))
    assert not consumers.known("default")
    assert consumers.delete_old("default", timedelta(days=1)) == 1


class TestRelay:
    def test_paused_relay_sends_nothing_until_it_is_resumed_or_drained(self, a_process, running, relay_rows):
        running(a_process("inbox_consume"))
        relay = running(a_process("outbox_relay"))
        relay.until(lambda: relay_rows.only)

        relay_rows.request(Request.PAUSE)
        relay.until(lambda: relay_rows.is_in(Mode.PAUSED))
        published(topic=JOB, payload={})
        relay_rows.goes_on(relay)
        assert states() == {State.READY}

        relay_rows.request(Request.RESUME)
        relay.until(Effect.objects.exists)
        relay.until(lambda: relay_rows.is_in(Mode.RUNNING))

        relay_rows.request(Request.PAUSE)
        relay.until(lambda: relay_rows.is_in(Mode.PAUSED))
        for _ in range(20):
            published(topic=JOB, payload={})
        relay_rows.request(Request.DRAIN)

        assert relay.ends() == 0, relay.said()
        assert states() == {State.PUBLISHED}
        [row] = relay_rows.all()
        assert row.stopped_at is not None
        assert "an operator requested: drain; this process is draining" in relay.said()

    @pytest.mark.parametrize("name", ["outbox_relay", "inbox_consume"])
    def test_heartbeat_has_memory_and_round_trips_until_the_process_is_stopped_in_an_orderly_way(
        self, a_process, running, relay_rows, consumer_rows, name
    ):
        relay = running(a_process(name))
        rows = relay_rows if name == "outbox_relay" else consumer_rows
        relay.until(lambda: rows.only and rows.only.database_ms and rows.only.broker_ms)
        assert rows.only.memory_bytes > 10_000_000
        assert 0 < rows.only.database_ms < 10_000
        assert 0 < rows.only.broker_ms < 10_000
        if name == "outbox_relay":
            relay.until(lambda: rows.only.facts["shards"] == 64)

        rows.request(Request.STOP)

        assert relay.ends() == 0, relay.said()
        [row] = rows.all()
        assert row.stopped_at is not None
        assert row.acknowledged_at is not None
        assert rows.only is None

    def test_paused_relay_of_local_runs_no_handler_until_it_is_resumed(self, command, running, relay_rows, consumer_rows):
        relay = running(command("outbox_relay", OUTBOX={"BROKER_URL": "local://"}))
        relay.until(lambda: relay_rows.only and consumer_rows.only)

        consumer_rows.request(Request.PAUSE)  # both rows are of one process
        relay.until(lambda: consumer_rows.is_in(Mode.PAUSED) and relay_rows.only.mode == Mode.PAUSED)
        published(topic=JOB, payload={})
        relay_rows.goes_on(relay)
        assert states() == {State.READY}

        relay_rows.request(Request.RESUME)
        relay.until(Effect.objects.exists)


class TestConsumer:
    def test_paused_consumer_leaves_messages_at_the_broker_until_it_is_resumed_or_drained(
        self, a_process, waiting, running, consumer_rows, rabbitmq_url
    ):
        consumer = running(a_process("inbox_consume"))
        consumer.until(lambda: consumer_rows.only and "receiving from 3 queues" in consumer.said())

        consumer_rows.request(Request.PAUSE)
        consumer.until(lambda: consumer_rows.is_in(Mode.PAUSED))
        consumer.until(lambda: consumer.said().count("paused. Its queue keeps the messages") == 3)
        send(rabbitmq_url, JOB, {}, message_id="m-1")
        consumer_rows.goes_on(consumer)
        assert waiting(OF_THE_WORKERS) == 1
        assert not Effect.objects.exists()

        consumer_rows.request(Request.RESUME)
        consumer.until(Effect.objects.exists)
        assert waiting(OF_THE_WORKERS) == 0
        consumer.until(lambda: consumer_rows.is_in(Mode.RUNNING))

        consumer_rows.request(Request.PAUSE)
        consumer.until(lambda: consumer_rows.is_in(Mode.PAUSED))
        for number in range(20):
            send(rabbitmq_url, JOB, {}, message_id=f"later-{number}")
        consumer_rows.request(Request.DRAIN)

        assert consumer.ends() == 0, consumer.said()
        assert Effect.objects.count() == 21
        assert [row.stopped_at is None for row in consumer_rows.all()] == [False]


@pytest.mark.every_database
def test_request_without_effect_is_refused_and_a_later_one_replaces_one_that_was_not_read():
    relay = a_relay()
    assert not relays.request("default", relay.id, Request.RESUME, "ada")
    assert relays.request("default", relay.id, Request.PAUSE, "ada")
    assert relays.request("default", relay.id, Request.STOP, "bob")
    relays.acknowledge("default", relay.id, Request.PAUSE, Mode.PAUSED)  # it has read the first one only
    assert relays.pending("default", relay.id) is Request.STOP

    ProcessRow.objects.update(mode=Mode.STOPPING)
    assert not relays.request("default", relay.id, Request.DRAIN, "ada")
    relays.mark_stopped("default", relay.id)
    assert not relays.request("default", relay.id, Request.STOP, "ada")


@pytest.mark.every_database
def test_heartbeat_does_not_overwrite_a_request():
    consumers.request("default", a_consumer().id, Request.PAUSE, "ada")

    row = consumers.rows("default").get()
    assert (row.requested, row.requested_by, row.acknowledged_at) == ("pause", "ada", None)


class TestCommands:
    def test_list_shows_state_memory_and_round_trips_of_every_process(self):
        a_relay(host="one", memory_bytes=64 * 2**20, database_ms=1.25, broker_ms=2.5)
        relays.mark_stopped("default", a_relay(host="two").id)

        listed = output_of("exactly_once_processes")

        one, two = (line for line in listed.splitlines() if line.startswith(("one", "two")))
        assert all(words in one for words in ("64 MB", "1.2 ms", "2.5 ms", "812.5", "running"))
        assert "stopped" in two

    def test_request_by_host_and_pid_by_the_beginning_of_the_id_and_to_all_that_run(self):
        relay, consumer, stopped = a_relay(), a_consumer(), a_relay(host="stopped")
        relays.mark_stopped("default", stopped.id)

        assert "is asked to pause" in output_of("exactly_once_processes", "pause", "relay-1:4711")
        assert "is asked to stop" in output_of("exactly_once_processes", "stop", str(consumer.id)[:8])

        assert relays.pending("default", relay.id) is Request.PAUSE
        assert consumers.pending("default", consumer.id) is Request.STOP
        entry = AuditEntry.objects.get(app="outbox")
        assert (entry.action, entry.kind, entry.object_id) == ("pause", "process", str(relay.id))
        assert entry.place == "exactly_once_processes"
        assert AuditEntry.objects.get(app="inbox").action == "stop"

        output_of("exactly_once_processes", "drain", "--all")
        assert relays.pending("default", relay.id) is Request.DRAIN
        assert relays.pending("default", stopped.id) is None

    def test_request_that_cannot_be_made_fails(self):
        a_relay()

        for arguments, reason in (
            (["pause"], "Name the processes"),
            (["pause", "elsewhere:1"], "No running processes are called 'elsewhere:1'"),
            (["resume", "relay-1:4711"], "no effect in the state of: relay-1:4711"),
            (["end", "relay-1:4711"], r"choose from '?list'?, '?pause'?, '?resume'?, '?drain'?, '?stop'?\)"),
        ):
            with pytest.raises(CommandError, match=reason):
                output_of("exactly_once_processes", *arguments)
        assert not AuditEntry.objects.exists()

    def test_request_to_all_says_that_none_runs(self):
        relays.mark_stopped("default", a_relay().id)

        assert output_of("exactly_once_processes", "stop", "--all") == "No process is running."

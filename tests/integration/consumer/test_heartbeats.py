"""Heartbeats of processes that run handlers: who runs, for which handlers, and what each waits for."""

import json
import threading
from datetime import timedelta
from functools import partial

import pytest
from django.db import transaction

from exactly_once.models import Process as ProcessRow
from exactly_once.process.clock import utcnow
from exactly_once.upkeep import heartbeat_table
from exactly_once.upkeep.heartbeat_table import SILENT_AFTER
from inbox.consumer import heartbeat as module
from inbox.consumer.heartbeat import Activity, Heartbeats
from inbox.models import PausedHandler
from inbox.operators.processes import queued
from inbox.store.handler_rows import consumers
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB
from tests.support.deliveries import the_effect
from tests.support.heartbeats import a_consumer, let_consumers_fall_silent
from tests.support.relaying import published
from tests.support.servers.private import free_port
from tests.support.sql import executed
from tests.support.waiting import wait_until
from tests.support.workers import GROUP, send

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

HANDLERS = ["worker.chained", "worker.named", "worker.work"]


class Service:
    """A project with the handlers `HANDLERS`."""

    def __init__(self, command, broker):
        self.runs = partial(command, OUTBOX={"BROKER_URL": broker}, INBOX={"GROUP": GROUP})

    def status(self, *options):
        """What `exactly_once_status` prints."""
        process = self.runs("exactly_once_status", *options)
        process.log.unlink(missing_ok=True)
        with process:
            assert process.ends() == 0, process.said()
        return process.said()

    def status_as_json(self):
        return json.loads(self.status("--json"))["inbox"]


@pytest.fixture
def service(command):
    return partial(Service, command)


def heartbeats():
    return list(consumers.rows("default"))


def test_status_shows_a_running_consumer_with_its_handlers_and_counts_until_it_ends(service, rabbitmq_url):
    service = service(rabbitmq_url)
    with service.runs("inbox_consume") as consumer:
        consumer.until(lambda: f"receiving from {len(HANDLERS)} queues" in consumer.said())
        send(rabbitmq_url, JOB, {}, message_id="m-1")
        consumer.until(lambda: [row.facts["received"] for row in heartbeats()] == [1])
        shown = service.status_as_json()
        text = service.status()
        assert consumer.end() == 0

    [row] = shown["consumers"]
    common = {"id", "host", "pid", "version", "started", "beat", "last_pass", "rate", "waits_for", "silent"}
    assert set(row) == {*common, "handlers", "received", "ran", "threads", "queued", "waits"}
    assert (row["handlers"], row["received"], row["waits_for"], row["silent"]) == (HANDLERS, 1, "", False)
    assert shown["unattended"] == []
    assert f"running: {', '.join(HANDLERS)}" in text
    assert "No consumer is running" not in text
    assert not heartbeats()
    assert f"No consumer is running for: {', '.join(HANDLERS)}. Any messages for them wait in the broker" in service.status()


def test_messages_that_wait_at_the_broker_are_shown_also_those_of_a_paused_handler(service, rabbitmq_url):
    service = service(rabbitmq_url)
    with service.runs("inbox_consume", "--drain") as declaring:
        assert declaring.ends() == 0  # the queues exist now
    PausedHandler.objects.create(handler="worker.work", paused_by="ada", paused_at=utcnow())
    for number in range(3):
        send(rabbitmq_url, JOB, {}, message_id=f"m-{number}")
    with service.runs("inbox_consume") as consumer:
        consumer.until(lambda: queued("default") == {**dict.fromkeys(HANDLERS, 0), "worker.work": 3})

        text, shown = service.status(), service.status_as_json()

    assert "at the broker: worker.work" in text
    assert shown["queued"]["worker.work"] == 3


def test_killed_consumer_is_shown_as_silent_and_its_handlers_as_unattended(service, rabbitmq_url):
    service = service(rabbitmq_url)
    with service.runs("inbox_consume") as consumer:
        consumer.until(lambda: len(heartbeats()) == 1)
        consumer.kill()
        consumer.ends()
    let_consumers_fall_silent(2 * SILENT_AFTER)

    shown = service.status_as_json()

    assert [row["silent"] for row in shown["consumers"]] == [True]
    assert shown["unattended"] == HANDLERS
    assert "silent: worker.chained" in service.status()


def test_consumer_without_a_broker_is_shown_with_what_it_waits_for(service):
    service = service(f"amqp://user:secret@127.0.0.1:{free_port()}//")
    with service.runs("inbox_consume") as consumer:
        consumer.until(lambda: [row.waits_for for row in heartbeats() if "refused" in row.waits_for])
        text = service.status()

    assert "waits for the broker: " in text
    assert "secret" not in text


@pytest.mark.every_database
@pytest.mark.parametrize("name", ["outbox_relay", "inbox_consume"])
def test_process_that_runs_the_handlers_of_local_is_shown_as_a_consumer(service, name):
    service = service("local://")
    assert "Any messages for them wait in the database. Start outbox_relay or inbox_consume." in service.status()

    with service.runs(name) as process, service.runs("outbox_relay"):
        process.until(heartbeats)
        published(topic=JOB, payload={})
        process.until(lambda: sum(row.facts["ran"] for row in heartbeats()) == 1)
        shown = service.status_as_json()
        assert process.end() == 0

    assert {tuple(row["handlers"]) for row in shown["consumers"]} == {tuple(HANDLERS)}
    assert shown["unattended"] == []


@pytest.mark.every_database
class TestThreads:
    """In this process, with handlers of its own."""

    @pytest.fixture(autouse=True)
    def often(self, monkeypatch):
        monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
        monkeypatch.setattr(heartbeat_table, "UNCHANGED_SECONDS", 0.05)

    def test_each_database_gets_a_row_with_the_handlers_that_write_to_it(self, handles):
        here, there = handles(the_effect, name="tests.here"), handles(the_effect, name="tests.there", using="other")
        heartbeats = Heartbeats(lambda: Activity(handlers=[here, there], received=3, ran=2))

        with heartbeats.sending(["default", "other"]):
            wait_until(lambda: consumers.rows("default") and consumers.rows("other"))
            rows = [consumers.rows(alias).get() for alias in ("default", "other")]

        assert [row.facts["handlers"] for row in rows] == [["tests.here"], ["tests.there"]]
        assert [(row.facts["received"], row.facts["ran"]) for row in rows] == [(3, 2), (3, 2)]
        assert not consumers.rows("default")
        assert not consumers.rows("other")

    def test_heartbeat_is_written_again_with_what_has_changed(self):
        said = {"waits_for": "", "ran": 0}

        with Heartbeats(lambda: Activity(handlers=[], **said)).sending(["default"]):
            wait_until(lambda: consumers.rows("default"))
            first = consumers.rows("default").get()
            said.update(waits_for="the broker:\n\x1b[2Jgone", ran=7)
            wait_until(lambda: consumers.rows("default").get().facts["ran"] == 7)
            second = consumers.rows("default").get()

        assert second.waits_for == "the broker: [2Jgone"
        assert second.beat_at > first.beat_at
        assert abs(second.started_at - first.started_at) < timedelta(seconds=1)

    def test_row_of_a_process_that_is_silent_for_a_day_is_deleted_by_the_next_one(self):
        a_consumer(host="old", silent_for=timedelta(days=2))
        a_consumer(host="recent", silent_for=timedelta(hours=23))

        with Heartbeats(lambda: Activity(handlers=[])).sending(["default"]):
            wait_until(lambda: not ProcessRow.objects.filter(host="old"))

        assert consumers.rows("default").get().host == "recent"

    def test_nothing_is_sent_inside_the_transaction_of_a_test(self):
        with transaction.atomic(), Heartbeats(pytest.fail).sending(["default"]):
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("heartbeat-")]


def test_locked_table_of_heartbeats_stops_neither_handling_nor_the_end_of_a_consumer(service, rabbitmq_url):
    service = service(rabbitmq_url)
    with service.runs("inbox_consume") as consumer:
        consumer.until(lambda: heartbeats() and f"receiving from {len(HANDLERS)} queues" in consumer.said())
        with transaction.atomic():
            lock_the_table()
            send(rabbitmq_url, JOB, {}, message_id="m-1")
            consumer.until(Effect.objects.exists)
            assert consumer.end() == 0


def lock_the_table():
    executed(f"LOCK TABLE {ProcessRow._meta.db_table} IN ACCESS EXCLUSIVE MODE")

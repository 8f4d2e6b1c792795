"""Metrics: what relays and consumers count, and what Prometheus reads from the tables."""

import socket
import sys
import threading
import urllib.request
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import inbox.metrics
import outbox.metrics
from exactly_once.metrics import MOST_SERIES, OTHER, Instrument, instruments
from exactly_once.sql.now import DatabaseTime
from exactly_once.telemetry import prometheus
from inbox import Reject, RetryLater
from inbox import monitoring as inbox_tables
from inbox.receiving.in_hand import InHand
from inbox.receiving.receive import Policy
from inbox.states import Outcome
from outbox import monitoring as outbox_tables
from outbox.states import State
from outbox.store import paused_topics
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import InAThread, an_envelope, at_once, deliver, fails, options, the_effect
from tests.support.heartbeats import a_relay
from tests.support.open_transactions import OpenTransaction
from tests.support.relaying import drained, published, set_columns
from tests.support.servers.private import free_port
from tests.support.sql import executed, fetched
from tests.support.waiting import A_WHILE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


class Recorder:
    """A metric, or one of its series, that records what it is given by the values of its labels."""

    def __init__(self, recorded=None, values=()):
        self.recorded = {} if recorded is None else recorded
        self._values = values

    def labels(self, *values):
        self.recorded.setdefault(values, [])
        return Recorder(self.recorded, values)

    def inc(self, amount):
        self.recorded.setdefault(self._values, []).append(amount)

    observe = set = inc


@pytest.fixture
def recorded():
    """Record what the instruments are given, by name and label values."""
    attached = {instrument: instrument._metric for instrument in instruments.values()}
    for instrument in attached:
        instrument.attach(Recorder())
    yield lambda instrument: instrument._metric.recorded
    for instrument, metric in attached.items():
        instrument.attach(metric)


def samples(text):
    """The samples of an exposition, by name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(*gauges):
    registry = CollectorRegistry()
    for one in gauges:
        registry.register(one)
    return samples(generate_latest(registry).decode())


class TestCounting:
    def test_relay_counts_published_failed_and_dead_messages_by_topic_with_their_lag(self, peer, recorded):
        for topic in ("a", "a", "b", "refused"):
            published(topic)
        peer.script = lambda message: [partial(peer.nack if message.routing_key == "refused" else peer.ack, message)]
        drained(peer.url, MAX_ATTEMPTS=1)

        assert {values: sum(found) for values, found in recorded(outbox.metrics.PUBLISHED).items()} == {("a",): 2, ("b",): 1}
        lags = recorded(outbox.metrics.LAG)[()]
        assert len(lags) == 3
        assert all(0 <= lag < 600 for lag in lags)
        assert sum(recorded(outbox.metrics.PASS_MESSAGES)[()]) == 4
        assert recorded(outbox.metrics.FAILED_ATTEMPTS) == recorded(outbox.metrics.DEAD) == {("refused",): [1]}

    def test_inbox_counts_effects_failures_deferrals_and_duplicates(self, handles, recorded):
        def defers(message):
            raise RetryLater(timedelta(hours=1))

        good, bad, deferring = handles(the_effect, name="good"), handles(fails, name="bad"), handles(defers, name="late")
        envelope = an_envelope()
        for handler in (good, good, bad, deferring):
            deliver(handler, envelope)

        assert recorded(inbox.metrics.HANDLED) == {("good",): [1]}
        assert recorded(inbox.metrics.FAILED_ATTEMPTS) == {("bad",): [1]}
        assert recorded(inbox.metrics.DEFERRALS) == {("late",): [1]}
        [(handler, _cause)] = recorded(inbox.metrics.DUPLICATES)
        assert handler == "good"
        assert set(recorded(inbox.metrics.HANDLER_SECONDS)) == {("good",), ("bad",), ("late",)}


class TestWaiting:
    """How long handlers wait for locks, and deliveries for concurrent duplicates. (PostgreSQL: SQLite has one writer.)"""

    WAIT_SECONDS = 0.3

    def has_waited(self):
        """Has a session waited for a lock for so long?"""
        waited = fetched(
            "SELECT EXTRACT(EPOCH FROM max(clock_timestamp() - waitstart)) FROM pg_locks WHERE NOT granted "
            "AND pid IN (SELECT pid FROM pg_stat_activity WHERE datname = current_database())"
        )
        return (waited or 0) > self.WAIT_SECONDS

    def test_wait_of_a_handler_for_a_locked_row_is_measured(self, handles, recorded):
        row = Effect.objects.create(name="account")

        def handle(message):
            Effect.objects.count()
            Effect.objects.select_for_update().get(pk=row.pk)
            the_effect(message)

        handler = handles(handle, name="waits")
        with ExitStack() as stack, transaction.atomic():
            Effect.objects.filter(pk=row.pk).update(detail="locked")
            first = stack.enter_context(InAThread(lambda: deliver(handler)))
            wait_until(self.has_waited)
        assert first.answer is Outcome.HANDLED

        waited, inserted = recorded(inbox.metrics.LOCKING_SECONDS)[("waits",)]  # the count locks nothing
        assert self.WAIT_SECONDS < waited < 60
        assert 0 <= inserted < 60

    @pytest.mark.parametrize("outcome", ["deferred", "duplicate", "begun"])
    def test_wait_for_a_concurrent_duplicate_is_measured_by_its_outcome(self, handles, recorded, monkeypatch, outcome):
        begun, go_on, again = threading.Event(), threading.Event(), threading.Event()

        def handle(message):
            if begun.is_set():
                again.set()
                return
            begun.set()
            assert go_on.wait(30)
            if outcome == "begun":
                raise Reject("the first one fails")

        def settle_later(policy, arrival, error):
            """Or the copy would find the dead letter, if it is slow."""
            assert again.wait(30)
            return settle(policy, arrival, error)

        settle = Policy.settle_failure
        monkeypatch.setattr(Policy, "settle_failure", settle_later)
        handler, envelope = handles(handle, name="waits"), an_envelope()
        long = options(DUPLICATE_TIMEOUT=timedelta(seconds=30 if outcome != "deferred" else self.WAIT_SECONDS))
        with InAThread(lambda: deliver(handler, envelope)):
            assert begun.wait(30)
            monkeypatch.setattr("inbox.receiving.receive.in_hand", InHand())  # the copy is in another process
            with InAThread(lambda: deliver(handler, envelope, given=long)) as second:
                if outcome == "deferred":
                    wait_until(lambda: ("waits", outcome) in recorded(inbox.metrics.BEGIN_SECONDS))
                else:
                    wait_until(self.has_waited)
                go_on.set()

        answers = {"deferred": Outcome.DEFERRED, "duplicate": Outcome.DUPLICATE, "begun": Outcome.HANDLED}
        assert second.answer is answers[outcome]
        assert max(recorded(inbox.metrics.BEGIN_SECONDS)[("waits", outcome)]) >= self.WAIT_SECONDS * 0.9


def test_label_sets_of_an_instrument_are_bounded_and_one_without_an_exporter_counts_nothing(monkeypatch):
    monkeypatch.setattr("exactly_once.metrics.instruments", {})
    instrument = Instrument(name="t_total", kind="counter", help="t", labels=("topic",))
    instrument.add(1, "a")
    assert (instrument.is_attached, instrument._series) == (False, {})
    instrument.attach(recorder := Recorder())
    for number in range(MOST_SERIES + 10):
        instrument.add(1, f"topic-{number}")
    instrument.add(1, "topic-0")

    assert len(recorder.recorded) == MOST_SERIES + 1
    assert sum(recorder.recorded[(OTHER,)]) == 10
    assert sum(recorder.recorded[("topic-0",)]) == 2


@pytest.mark.every_database
class TestTableGauges:
    def test_outbox_gauges_show_states_age_relays_and_paused_topics_and_are_read_once(self):
        set_columns(published("t"), available_at=DatabaseTime(-timedelta(hours=1)))
        set_columns(published("t"), state=State.DEAD, available_at=DatabaseTime(-timedelta(hours=5)))
        call_command("outbox_pause", "t")
        set_columns(published("t"), state=State.PAUSED)
        paused_topics.limit("default", "limited", 5.0, [])
        a_relay()
        gauges = outbox_tables.table_gauges("default")
        found = scraped(gauges)

        assert found["outbox_messages", "default", "ready"] == 1
        assert found["outbox_messages", "default", "dead"] == 1
        assert found["outbox_messages", "default", "stuck"] == 0
        assert ("outbox_messages", "default", "published") not in found
        assert timedelta(hours=1) <= timedelta(seconds=found["outbox_oldest_due_seconds", "default"]) < timedelta(hours=2)
        assert found["outbox_relays", "default", "working"] == 1
        assert found["outbox_table_readable", "default"] == 1
        paused = {name: value for name, value in found.items() if "outbox_paused_messages" in name}
        assert paused == {("outbox_paused_messages", "default", "t"): 1}
        published("t")
        assert scraped(gauges) == found, "scrapes that follow each other read the tables once"

    def test_inbox_gauges_show_open_states_and_unattended_handlers(self, handles):
        handles(lambda message: None)
        found = scraped(inbox_tables.table_gauges("default"))

        assert found["inbox_messages", "default", "dead"] == 0
        assert found["inbox_unattended_handlers", "default"] >= 1
        assert ("inbox_messages", "default", "done") not in found

    def test_gauges_of_tables_that_cannot_be_read_are_left_out_and_not_zero(self):
        executed("ALTER TABLE outbox_pausedtopic RENAME TO hidden")
        try:
            found = scraped(outbox_tables.table_gauges("default"))
        finally:
            executed("ALTER TABLE hidden RENAME TO outbox_pausedtopic")

        assert found == {("outbox_table_readable", "default"): 0}


def test_scrapes_do_not_pile_up_while_the_tables_are_locked(monkeypatch):
    monkeypatch.setattr(prometheus, "_LONGEST_SECONDS", 0.5)
    gauges, unread = outbox_tables.table_gauges("default"), {("outbox_table_readable", "default"): 0}
    before = set(threading.enumerate())
    other = OpenTransaction()
    try:
        other.does(executed, "LOCK TABLE outbox_pausedtopic IN ACCESS EXCLUSIVE MODE").result(A_WHILE)
        assert at_once([lambda: scraped(gauges)] * 8) == [unread] * 8
        assert scraped(gauges) == unread
        assert [thread.name for thread in set(threading.enumerate()) - before].count("metrics") == 1
    finally:
        other.ends()

    wait_until(lambda: scraped(gauges).get(("outbox_table_readable", "default")) == 1)


@pytest.fixture
def scraping(a_process):
    """Start a command with a port for metrics; the process and a function that scrapes it."""

    def start(name, url, *arguments):
        port = free_port()
        options = ["--metrics-port", str(port), "--metrics-address", "127.0.0.1", *arguments]
        process = a_process(name, *options, outbox={"BROKER_URL": url}, BROKER_URL=url)

        def scrape():
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                    return samples(answer.read().decode())
            except OSError:
                return {}

        return process, scrape

    return start


def test_relay_and_consumer_serve_what_they_have_counted(scraping, rabbitmq_url):
    relay, scrape_relay = scraping("outbox_relay", rabbitmq_url)
    consumer, scrape_consumer = scraping("inbox_consume", rabbitmq_url)
    with relay, consumer:
        consumer.until(lambda: ("inbox_table_readable", "default") in scrape_consumer() and "receiving from" in consumer.said())
        for _ in range(3):
            published(topic="worker.job", payload={})
        relay.until(lambda: scrape_relay().get(("outbox_published_total", "worker.job")) == 3)
        consumer.until(lambda: scrape_consumer().get(("inbox_handled_total", "worker.work")) == 3)

        assert scrape_consumer()["inbox_handler_seconds_count", "worker.work"] == 3


def test_outage_is_counted_while_it_lasts(scraping):
    relay, scrape = scraping("outbox_relay", f"amqp://guest:guest@127.0.0.1:{free_port()}//")
    with relay:
        relay.until(lambda: scrape().get(("exactly_once_outage_seconds_total", "broker"), 0) > 0.5)

        assert scrape()["exactly_once_outages_total", "broker"] == 1


def test_port_that_is_in_use_is_an_error_of_one_line_and_without_prometheus_client_the_option_names_the_extra(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CommandError, match=f"--metrics-port {port}: "):
            prometheus.serve_metrics({"metrics_port": port, "metrics_address": "127.0.0.1"})
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(CommandError, match=r"django-exactly-once\[prometheus\]"):
        prometheus.serve_metrics({"metrics_port": 1, "metrics_address": ""})

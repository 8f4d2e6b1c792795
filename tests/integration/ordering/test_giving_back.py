"""A consumer gives the queue of an ordered handler back while messages arrive: the next consumer continues in the order."""

import logging
import socket
import threading
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import kombu
import pytest
from django.core.management import call_command

from inbox import pause, resume
from inbox.consumer.topology import queue_of
from tests.support.apps.effects.models import Effect
from tests.support.apps.ordered import STEP
from tests.support.deliveries import the_effect
from tests.support.servers import FaultProxy
from tests.support.threads import in_threads
from tests.support.waiting import A_WHILE, wait_until
from tests.support.workers import STEP_OF_THE_WORKERS as HANDLER
from tests.support.workers import broker_options, consuming, declare, producing, send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.timeout(240)]

PER_SECOND = 100
ACK_TIMEOUT_SECONDS = 2
SOME = 30
"""So many effects show that a consumer receives."""


@contextmanager
def sending(url):
    """Messages of one key, one after the other, during the block; yields the list of their ids."""
    sent, end = [], threading.Event()

    def send():
        declare(HANDLER, broker_options(url))
        with producing(url) as produce:
            while not end.wait(1 / PER_SECOND):
                name = f"{len(sent):06}"
                headers = {"cloudEvents:orderingkey": "key"}
                produce({"fails": False}, routing_key=STEP, message_id=name, headers=headers)
                sent.append(name)

    with in_threads(send, stop=end):
        yield sent


def some_more_effects():
    enough = Effect.objects.count() + SOME
    wait_until(lambda: Effect.objects.count() >= enough)


class Pair:
    """Two consumers of the ordered handler. The first one's connections to database and broker can be broken."""

    def __init__(self, command, **urls):
        self._command = command
        self._urls = urls
        self._stack = ExitStack()

    def __enter__(self):
        broker, database = (urlsplit(self._urls[name]) for name in ("BROKER_URL", "DATABASE_URL"))
        self.to_broker = self._stack.enter_context(FaultProxy(broker.hostname, broker.port))
        self.to_database = self._stack.enter_context(FaultProxy(database.hostname, database.port))
        self.first = self._started(
            "first",
            BROKER_URL=self.to_broker.through(broker.geturl()),
            DATABASE_URL=self.to_database.through(database.geturl()),
        )
        self.second = self._started("second")
        return self

    def __exit__(self, *exc_info):
        self._stack.close()

    def _started(self, name, **urls):
        given = {"variables": {**self._urls, **urls}, "INBOX": {"GROUP": "tests", "ACK_TIMEOUT": ACK_TIMEOUT_SECONDS}}
        process = self._command("inbox_consume", "--handlers", HANDLER.name, app="ordered", log=name, **given)
        self._stack.enter_context(process)
        process.until(lambda: "receiving from 1 queue at" in process.said())
        return process

    def request(self, request, process):
        call_command("exactly_once_processes", request, f"{socket.gethostname()}:{process.pid}")


def gives_back(process, count):
    process.until(lambda: process.said().count("paused. Its queue keeps the messages") == count)


def receives(process, count):
    process.until(lambda: process.said().count("receiving from 1 queue at") == count)


def pausing_one_process_after_the_other(pair):
    for count, process in ((1, pair.first), (1, pair.second), (2, pair.first)):
        pair.request("pause", process)
        gives_back(process, count)
        pair.request("resume", process)
        receives(process, count + 1)


def pausing_the_handler(pair):
    for count in range(1, 4):
        pause(HANDLER.name)
        for process in (pair.first, pair.second):
            gives_back(process, count)
        resume(HANDLER.name)
        for process in (pair.first, pair.second):
            receives(process, count + 1)


def losing_the_database(pair):
    pair.to_database.refuse()
    pair.to_database.cut()
    pair.first.until(lambda: "They were returned to the broker" in pair.first.said())
    some_more_effects()
    pair.to_database.accept()


def losing_the_broker(pair):
    pair.to_broker.cut()


def stopping(pair):
    pair.request("stop", pair.first)
    assert pair.first.ends() == 0


def terminating(pair):
    assert pair.first.end() == 0


def killing(pair):
    pair.first.kill()
    pair.first.ends()


SLOW = [pausing_one_process_after_the_other, pausing_the_handler, losing_the_broker, stopping, terminating, killing]


@pytest.mark.parametrize(
    "way",
    [losing_the_database, *(pytest.param(way, marks=pytest.mark.long) for way in SLOW)],
    ids=lambda way: way.__name__.replace("_", " "),
)
def test_consumer_that_gives_an_ordered_queue_back_under_load_keeps_the_order(process_environment, command, rabbitmq_url, way):
    with Pair(command, BROKER_URL=rabbitmq_url, DATABASE_URL=process_environment["DATABASE_URL"]) as pair:
        with sending(rabbitmq_url) as sent:
            some_more_effects()
            way(pair)
            some_more_effects()
        # A slow machine handles one key more slowly than its messages arrive.
        wait_until(lambda: Effect.objects.count() >= len(sent), within=3 * A_WHILE)

    effects = list(Effect.objects.order_by("id").values_list("name", flat=True))
    assert effects == sent


def test_broken_order_is_reported_if_another_program_gives_the_queue_back_too_late(handling, rabbitmq_url, caplog):
    """It cancels its subscription before it closes its channel, so a consumer receives later messages meanwhile."""
    caplog.set_level(logging.INFO)
    handler, options = handling(the_effect, ordered=True), broker_options(rabbitmq_url)
    headers = {"cloudEvents:orderingkey": "key"}
    with kombu.Connection(rabbitmq_url) as connected:
        channel, received = connected.channel(), []
        subscription = kombu.Consumer(channel, [queue_of(handler, options)(channel)], on_message=received.append)
        subscription.consume()
        send(rabbitmq_url, handler.topics[0], {}, message_id="earlier", headers=headers)
        connected.drain_events(timeout=A_WHILE)
        with consuming([handler], options):
            wait_until(lambda: "receiving from 1 queue at" in caplog.text)
            subscription.cancel()
            for name in ("later", "latest"):
                send(rabbitmq_url, handler.topics[0], {}, message_id=name, headers=headers)
            wait_until(lambda: Effect.objects.count() == 2)
            assert "is broken" not in caplog.text
            channel.close()
            wait_until(lambda: Effect.objects.count() == 3)

    [report] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "the order of the key 'key' is broken" in report
    assert "message earlier again only after message latest" in report

"""Consumers and relays for the tests of the inbox: in a thread of the test, or as a process that may be killed."""

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import amqp
import kombu
from django.test import override_settings

from exactly_once.process.loop import StopRequest, Watchdog
from inbox import Lease, Ordered
from inbox.conf import InboxOptions
from inbox.consumer.consumer import Consumer
from inbox.consumer.topology import queue_name, queue_of
from inbox.handlers.handler import Handler
from outbox.relay.service import serve
from tests.support import processes
from tests.support.apps.leased import LEASED_JOB
from tests.support.apps.named import NAMED_AND_LEASED, NAMED_AND_ORDERED
from tests.support.apps.ordered import STEP
from tests.support.apps.worker import JOB, NAMED
from tests.support.deliveries import effects
from tests.support.threads import in_threads
from tests.support.waiting import A_WHILE, wait_until

EXCHANGE = "outbox"
GROUP = "tests"
CONFIRMED = {"confirm_publish": True}


def handler_of_the_workers(name, topic, **given):
    """A handler as far as its queue goes; the function lives in the processes."""
    return Handler(name=name, topics=(topic,), function=print, biz_id=None, using="default", **given)


OF_THE_WORKERS = handler_of_the_workers("worker.work", JOB)
NAMED_OF_THE_WORKERS = [
    handler_of_the_workers("worker.named", NAMED),
    handler_of_the_workers("named.named_and_ordered", NAMED_AND_ORDERED, ordered=Ordered()),
    handler_of_the_workers("named.named_and_leased", NAMED_AND_LEASED, kind=Lease()),
]
LEASED_OF_THE_WORKERS = handler_of_the_workers("leased.work", LEASED_JOB, kind=Lease())
STEP_OF_THE_WORKERS = handler_of_the_workers("ordered.step", STEP, ordered=Ordered())


def broker_options(url, **changes):
    values = {
        "BROKER_URL": url,
        "EXCHANGE": EXCHANGE,
        "GROUP": GROUP,
        "MAX_ATTEMPTS": 3,
        "BACKOFF": (timedelta(hours=1), timedelta(hours=2)),
        "REDELIVERY_AFTER": timedelta(hours=1),
        "DUPLICATE_TIMEOUT": timedelta(milliseconds=200),
    }
    return InboxOptions(**{**values, **changes})


@contextmanager
def consuming(handlers, options):
    """A consumer on a thread of this test; leaving asks it to end and waits until it has finished what is in hand."""
    stop = StopRequest()
    consumer = Consumer(handlers, options, stop=stop, watchdog=Watchdog(limit=timedelta(hours=1)))
    with in_threads(consumer.run, stop=stop):
        yield consumer


def declare(handler, options):
    """What a consumer does first, so that messages find their queue."""
    with kombu.Connection(options.broker_url) as connection:
        queue_of(handler, options)(connection.default_channel).declare()


@contextmanager
def producing(url):
    """A function that publishes persistent messages on one connection, as a foreign producer does.

    With confirms: RabbitMQ may silently lose the last messages of a channel that is closed at once.
    """
    with kombu.Connection(url, transport_options=CONFIRMED) as connection:
        producer = kombu.Producer(connection.default_channel, kombu.Exchange(EXCHANGE, "topic", durable=True))
        yield partial(producer.publish, delivery_mode=2)


def send(url, topic, payload, *, body=None, **properties):
    """Publish one message. The payload is JSON unless `body` says otherwise."""
    properties = {"content_type": "application/json", "content_encoding": "utf-8", **properties}
    with producing(url) as produce:
        produce(json.dumps(payload) if body is None else body, routing_key=topic, **properties)


def send_and_handle(url, topic, name):
    """Publish a message with this id, and wait until a consumer of the test has handled it."""
    send(url, topic, {}, message_id=name)
    wait_until(lambda: effects(name) == 1)


def send_all(url, topic, messages):
    """Publish messages, each given by its message id and its payload, on one connection."""
    with producing(url) as produce:
        for name, payload in messages:
            produce(payload, routing_key=topic, serializer="json", message_id=name)


def send_burst(url, topic, kinds):
    """Messages with these kinds as payload, all in the queue at the end: `<kind>-<number>`, from 0 on."""
    with kombu.Connection(url) as connection:
        producer = kombu.Producer(connection.default_channel, kombu.Exchange(EXCHANGE, "topic", durable=True))
        for number, kind in enumerate(kinds):
            properties = {"message_id": f"{kind}-{number}", "content_type": "application/json", "content_encoding": "utf-8"}
            producer.publish(json.dumps({"kind": kind}), routing_key=topic, delivery_mode=2, **properties)
        # An answer means that the broker has read all of them; the last ones of a channel closed at once may be lost.
        producer.exchange(connection.default_channel).declare()


def mark_redelivered(handler, options):
    """Have the broker deliver what is in the queue to a consumer that disconnects, so that it will be delivered again."""
    with kombu.Connection(options.broker_url) as connection:
        while connection.default_channel.basic_get(queue_name(handler, options)) is not None:
            pass


def relay(url):
    """Send everything that is due, as `outbox_relay --drain` does."""
    with override_settings(OUTBOX={"BROKER_URL": url, "EXCHANGE": EXCHANGE}):
        serve("default", drain=True)


def consumers_of(url, name):
    """How many consumers a queue of RabbitMQ has; 0 also without the queue. It is bound before it has one."""
    with kombu.Connection(url) as connection:
        try:
            return connection.default_channel.queue_declare(name, passive=True).consumer_count
        except amqp.NotFound:
            return 0


def length_of(server, handler, options):
    """How many messages RabbitMQ still holds for the handler, unacknowledged ones included; None without a queue."""
    return server.queue_lengths(options.broker_url).get(queue_name(handler, options))


class Process:
    """`manage.py <command>` in a process of its own, for `with`: nothing outlives its test."""

    module = "django"

    def __init__(self, environment, log, *command):
        self.log = log
        self._environment = environment
        self._command = [self.module, *command]
        self._process = None
        self.exits = []

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc_info):
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def start(self):
        self._process = processes.start(self._command, environment=self._environment, log=self.log)
        return self

    @property
    def pid(self):
        return self._process.pid

    def terminate(self):
        """Send SIGTERM when the process has a handler for it: before that, SIGTERM ends Python at once."""
        self.until(lambda: not self.has_ended() and catches(self._process.pid, signal.SIGTERM))
        self._process.send_signal(signal.SIGTERM)

    def end(self):
        """Ask it to end; its exit status."""
        self.terminate()
        return self.ends()

    def kill(self):
        self._process.kill()

    def freeze(self):
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self._process.send_signal(signal.SIGCONT)

    def ends(self):
        """Its exit status, once it has one."""
        try:
            status = self._process.wait(A_WHILE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.said()}") from None
        self.exits.append(status)
        return status

    def has_ended(self):
        return self._process.poll() is not None

    def peak_megabytes(self):
        """The most memory that it has had resident so far, by the kernel's count."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) // 1024

    def said(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def until(self, condition):
        """Wait for `condition` while the process lives."""

        def met():
            ended = self.has_ended()  # first: it may do what is waited for and end
            answer = condition()
            assert answer or not ended, f"it has ended with {self._process.poll()}:\n{self.said()}"
            return answer

        try:
            return wait_until(met)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def restarted_until(self, condition):
        """Start it again whenever it ends, as a supervisor does, until `condition`; how often it ended."""

        def met():
            if answer := condition():
                return answer
            if self.has_ended():
                self.exits.append(self._process.returncode)
                assert len(self.exits) < 20, self.said()
                self.start()
            return None

        # Every start takes its time.
        wait_until(met, within=1.5 * A_WHILE)
        return len(self.exits)


class CeleryWorker(Process):
    """`celery -A <app> worker <arguments>`, which is killed with the processes of its pool."""

    module = "celery"

    def __init__(self, app, environment, log, *arguments):
        quiet = ["--without-gossip", "--without-mingle", "--loglevel", "INFO"]
        # A pool leaves a directory for temporary files behind when it is killed.
        environment = {**environment, "C_FORCE_ROOT": "yes", "TMPDIR": str(log.parent)}
        super().__init__(environment, log, "-A", app, "worker", *arguments, *quiet)

    def __exit__(self, *exc_info):
        self.kill()

    def kill(self):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def is_ready(self):
        return " ready." in self.said()


def migrate(environment, log):
    """Make the tables of the environment's default database."""
    process = processes.start(["django", "migrate", "-v0"], environment=environment, log=log)
    assert process.wait(A_WHILE) == 0, log.read_text()


def catches(pid, number):
    """Whether a process has a handler for this signal; before that, SIGTERM ends Python at once."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        if Path("/proc/self").exists():
            return False  # it has ended
        time.sleep(1)  # no /proc on this system, and no other way to see it
        return True
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def as_environment(**given):
    """Options for `tests.support.apps.worker.settings`."""
    return {
        name: json.dumps(chosen, default=lambda duration: {"seconds": duration.total_seconds()})
        for name, chosen in given.items()
    }

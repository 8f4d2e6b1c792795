"""Helpers for tests of the inbox: deliver messages, run stored ones, and read the outcome."""

import json
import threading
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

from django.db import connections, transaction

from exactly_once.process.clock import utcnow
from exactly_once.process.loop import StopRequest
from exactly_once.sql.now import DatabaseTime
from exactly_once.testing.database import update_beside
from exactly_once.wire.envelope import Envelope
from inbox.conf import InboxOptions
from inbox.consumer.runner import Runner
from inbox.models import InboxMessage
from inbox.receiving.admit import admit, hand_over
from inbox.receiving.reading import read
from inbox.receiving.receive import receive
from inbox.states import DUE, Outcome
from inbox.store.arrivals import store_due
from tests.support.apps.effects.models import Effect
from tests.support.threads import InAThread
from tests.support.waiting import A_WHILE

TOPIC = "shop.order.placed"

OPTIONS = InboxOptions(
    MAX_ATTEMPTS=3,
    BACKOFF=(timedelta(hours=1), timedelta(hours=2)),
    REDELIVERY_AFTER=timedelta(hours=1),
    DUPLICATE_TIMEOUT=timedelta(milliseconds=200),
)
"""Nothing that is stored becomes due by itself while a test looks at it: `make_due` says when."""


def options(**changes):
    return replace(OPTIONS, **changes)


def an_envelope(payload=None, *, body=None, **attributes):
    """A fresh message of the topic most tests handle, published just now."""
    payload = {"order_id": 1} if payload is None else payload
    values = {
        "id": str(uuid.uuid4()),
        "topic": TOPIC,
        "source": "/shop",
        "created_at": utcnow(),
        "biz_id": f"order-{uuid.uuid4()}",
        "body": json.dumps(payload).encode() if body is None else body,
    }
    return Envelope(**{**values, **attributes})


def deliver(handler, envelope=None, *, given=OPTIONS, redelivered=False):
    """What the consumer does with one delivery, between taking it from the broker and answering."""
    arrival = read(handler, envelope or an_envelope(), given, redelivered=redelivered)
    return receive(handler, [arrival], given)[0]


def until_decided(handler, envelope):
    """As a broker does: deliver it again until it is not deferred any more."""
    received = deliver(handler, envelope)
    while received is Outcome.DEFERRED:
        received = deliver(handler, envelope, redelivered=True)
    return received


def admitted(handler, *envelopes, given=OPTIONS, redelivered=False, **options):
    """What becomes of deliveries that the consumer stores together, and does not run."""
    arrivals = [as_redelivered(read(handler, envelope, given), redelivered) for envelope in envelopes]
    return admit(handler, arrivals, given, **options)


def handed_over(handler, envelope=None):
    """Store a message as local:// does it, to be run by a runner; its envelope."""
    envelope = envelope or an_envelope(topic=handler.topics[0])
    with transaction.atomic():
        hand_over(handler, read(handler, envelope, OPTIONS))
    return envelope


def stored_due(handler, envelope=None):
    """Store a message that is due, as the careful path does it; its envelope."""
    envelope = envelope or an_envelope(topic=handler.topics[0])
    assert store_due(handler.using, read(handler, envelope, OPTIONS).row, OPTIONS.DUPLICATE_TIMEOUT)
    return envelope


def as_redelivered(arrival, redelivered=True):
    """The arrival of a delivery that the broker says it has made before."""
    return replace(arrival, row=replace(arrival.row, redelivered=redelivered))


def the_effect(message):
    """What most handlers of the tests do; no constraint prevents a second one."""
    return Effect.objects.create(name=message.biz_id, detail=str(message.attempt))


def fails(message):
    """A handler whose every attempt fails, after its effect."""
    the_effect(message)
    raise ValueError("no stock")


def effects(name=None):
    found = Effect.objects.all() if name is None else Effect.objects.filter(name=name)
    return found.count()


def the_row(**lookup):
    return InboxMessage.objects.get(**lookup)


def make_due(alias="default"):
    """Make every stored message due; return how many wait."""
    waiting = InboxMessage.objects.using(alias).filter(state__in=DUE, next_attempt_at__isnull=False)
    return update_beside(waiting, {"next_attempt_at": DatabaseTime()})


def drain(given=OPTIONS):
    """Run the due messages with the real runner; return how many were run."""
    return Runner(given).drain(StopRequest())


@contextmanager
def running(given=OPTIONS):
    """A runner in a thread, until the end of the block."""
    stop = StopRequest()
    with InAThread(lambda: Runner(given, stop).run(stop)):
        try:
            yield
        finally:
            stop.set()


def run_to_the_end(given=OPTIONS):
    """Run every stored message until it is settled."""
    for _ in range(10 * given.MAX_ATTEMPTS):
        if not make_due():
            return
        drain(given)
    raise AssertionError(f"still not settled: {list(InboxMessage.objects.filter(state__in=DUE))}")


def effects_by_name():
    """How many effects there are of each name."""
    return Counter(Effect.objects.values_list("name", flat=True))


def in_the_order_of_their_effects():
    """The names of the effects, in the order in which they were written."""
    return list(Effect.objects.order_by("pk").values_list("name", flat=True))


def time_until_retry(row):
    """The time until the next attempt of the row. The database and this process use the same machine's clock."""
    return row.next_attempt_at - utcnow()


def at_once(jobs):
    """Run `jobs` in a thread each, begun together, and give back their answers."""
    start = threading.Barrier(len(jobs))

    def run(job):
        try:
            start.wait(A_WHILE)
            return job()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(run, jobs))


class Slow:
    """A handler that sets `begun` and ends when the test sets `go_on`."""

    def __init__(self, error=None):
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.error = error
        self.runs = 0

    def __call__(self, message):
        self.runs += 1
        self.begun.set()
        assert self.go_on.wait(A_WHILE)
        if self.error:
            raise self.error
        the_effect(message)

    @contextmanager
    def inside(self, job):
        """A block while the handler is inside of `job`, which a thread runs; the handler goes on at the end of the block."""
        with InAThread(job) as thread:
            try:
                assert self.begun.wait(A_WHILE)
                yield thread
            finally:
                self.go_on.set()

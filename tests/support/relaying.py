"""Helpers for tests of the outbox: publish, relay, read the row, read from the broker."""

import threading
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import kombu
import pytest
from django.db import transaction

from exactly_once.process.clock import monotonic
from exactly_once.process.loop import StopRequest, Watchdog
from exactly_once.sql.days import LIVE, day_of
from outbox import Draft, publish, publish_many
from outbox.conf import OutboxOptions
from outbox.models import SHARDS, OutboxMessage
from outbox.relay.heartbeat import Heartbeat
from outbox.relay.passes import Pass
from outbox.relay.relay import Relay
from outbox.relay.timer import Timer
from outbox.states import SETTLED, State
from outbox.store import claiming, looking
from outbox.transports import amqp, open_transport
from tests.support.threads import SECONDS, in_threads
from tests.support.waiting import wait_until

EXCHANGE = "outbox"
TOPIC = "shop.order.placed"
A_GLANCE = 0.05


def published(topic=TOPIC, payload=None, *, using="default", **options):
    """A committed message."""
    with transaction.atomic(using=using):
        return publish(topic, {} if payload is None else payload, using=using, **options)


def published_many(count, topic=TOPIC, **options):
    """This many messages that are committed together; a function gives an argument of message number n."""
    with transaction.atomic():
        return publish_many(_draft(n, topic=topic, **options) for n in range(count))


def _draft(n, **options):
    return Draft(**{"payload": {}, **{name: option(n) if callable(option) else option for name, option in options.items()}})


def row_of(message, using="default"):
    return OutboxMessage.objects.using(using).get(message_id=message.id)


def state_of(message, using="default"):
    return row_of(message, using).state


def all_published(messages):
    return all(state_of(message) == State.PUBLISHED for message in messages)


def states(using="default"):
    """The states of all rows, in the order of their positions."""
    return list(OutboxMessage.objects.using(using).order_by("pk").values_list("state", flat=True))


def waiting(using="default"):
    """Is there a row that a relay has not finished?"""
    still = (State.READY, State.SCHEDULED, State.RETRYING)
    return OutboxMessage.objects.using(using).filter(state__in=still).exists()


def set_columns(message, using="default", **columns):
    """Put a row into a state that takes long to reach. The day of a settled row is today by default."""
    if "state" in columns:
        columns = {"day": day_of("default") if columns["state"] in SETTLED else LIVE, **columns}
    assert OutboxMessage.objects.using(using).filter(message_id=message.id).update(**columns) == 1


def in_state(state, **options):
    """A committed message in a state that takes long to reach."""
    message = published(**options)
    set_columns(message, state=state)
    return message


def a_backlog(count, keys=20):
    """This many committed messages; every second one has a key."""
    return published_many(count, key=lambda n: f"key-{n % keys}" if n % 2 else "")


def outcomes(sent):
    """The outcome of each position of a batch."""
    return {position: verdict.outcome for position, verdict in sent.verdicts.items()}


def soon(seconds=SECONDS):
    """A deadline for `Transport.send` that a healthy broker meets easily."""
    return monotonic() + seconds


@contextmanager
def deadline_when(transport, all_said):
    """The deadline of a batch comes when `all_said` holds and nothing is left to read, and a stall does not bring it."""
    leapt, read = [0.0], transport._read

    def reading(seconds):
        nothing_more = all_said()
        came = read(min(seconds, A_GLANCE))
        if nothing_more and not came:
            leapt[0] = 10 * SECONDS
        return came

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "_read", reading)
        patch.setattr(amqp, "monotonic", lambda: monotonic() + leapt[0])
        yield


def quick(**options):
    """Options with short delays, and with a deadline longer than any stall of the machine."""
    return OutboxOptions(
        **{
            "BATCH_DEADLINE": timedelta(seconds=30),
            "POLL_INTERVAL": timedelta(seconds=0.05),
            "BACKOFF": (timedelta(seconds=0.02), timedelta(seconds=0.05)),
            **options,
        }
    )


@contextmanager
def connected(url, *, alias="default"):
    transport = open_transport(url, alias=alias, exchange=EXCHANGE)
    transport.connect()
    try:
        yield transport
    finally:
        transport.close()


def one_pass(transport, *, limit=500, alias="default", **options):
    """One pass of a relay that does nothing else."""
    single = _pass_of(transport, alias, **options)
    found = looking.look(alias)
    single.topics.update(found.paused)
    return single.run(found.shards, limit)


def _pass_of(transport, alias, **options):
    """The same for one transport, unless it has options: it knows which messages await a confirm."""
    if options or transport not in _passes:
        _passes[transport] = Pass(alias, transport, quick(**options))
    return _passes[transport]


_passes = WeakKeyDictionary()


def in_hand(limit=500, alias="default", limits=None):
    """The rows that a pass would claim, inside the open transaction."""
    shards = looking.look(alias).shards
    return claiming.claim_ready(alias, shards, limit, limits=limits).rows


def relay_for(url, stop, *, alias="default", shards=range(SHARDS), timed=False, **options):
    options = quick(BROKER_URL=url, **options)
    transport = open_transport(url, alias=alias, exchange=EXCHANGE)
    watchdog = Watchdog(limit=options.WATCHDOG)
    heartbeat = Heartbeat(alias)
    return Relay(alias, transport, options, stop=stop, watchdog=watchdog, heartbeat=heartbeat, shards=shards, timed=timed)


def timer_for(relay, stop, *, alias="default", **options):
    options = quick(**options)
    return Timer(alias, options, watchdog=Watchdog(limit=options.WATCHDOG), ring=relay.bell.ring)


def drained(url, *, alias="default", **options):
    """Relay everything that is ready or due, in this thread."""
    relay = relay_for(url, StopRequest(), alias=alias, **options)
    relay.run(drain=True)
    return relay


@contextmanager
def relaying(url, *, relays=1, alias="default", timed=False, **options):
    """Relays in threads, each with connections of its own, until the block ends; `timed`, each with a timer beside it."""
    stop = StopRequest()
    running = [relay_for(url, stop, alias=alias, timed=timed, **options) for _ in range(relays)]
    timers = [timer_for(relay, stop, alias=alias, **options) for relay in running if timed]
    with in_threads(*(relay.run for relay in running), *(partial(timer.run, stop) for timer in timers), stop=stop):
        yield running


@contextmanager
def open_transaction(act):
    """The answer of `act`, called in another transaction, which commits when the block ends."""
    acted, may_end, answers = threading.Event(), threading.Event(), []

    def hold():
        with transaction.atomic():
            answers.append(act())
            acted.set()
            assert may_end.wait(SECONDS)

    with in_threads(hold):
        try:
            assert acted.wait(SECONDS)
            yield answers[0]
        finally:
            may_end.set()


class Queue:
    """A queue on a real broker, by default bound to the outbox's exchange; a name is that of a topic exchange."""

    def __init__(self, url, topic=TOPIC, name="tests", exchange=EXCHANGE, **arguments):
        self._connection = kombu.Connection(url)
        source = exchange if isinstance(exchange, kombu.Exchange) else kombu.Exchange(exchange, "topic", durable=True)
        queue = kombu.Queue(name, source, topic, durable=True, queue_arguments=arguments or None)
        self._bound = queue(self._connection.channel())
        self._bound.declare()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._connection.release()

    def take_all(self):
        """All messages that are in the queue now, oldest first."""
        taken = []
        while (message := self._bound.get(no_ack=True)) is not None:
            taken.append(message)
        return taken

    def take(self, count):
        """Wait for this many messages."""
        taken = []
        wait_until(lambda: taken.extend(self.take_all()) or len(taken) >= count)
        return taken


def ids(messages):
    """Message ids, of deliveries, of messages at the fake broker or of what publish() returned."""
    return [str(getattr(message, "id", None) or message.properties["message_id"]) for message in messages]

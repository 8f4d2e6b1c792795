"""Django's connection pool (`OPTIONS["pool"]`): web processes use it, workers keep a connection for each of their threads."""

from contextlib import ExitStack, contextmanager
from datetime import timedelta

import psycopg
import pytest
from django.db import close_old_connections, connection, transaction

from inbox.models import InboxMessage
from inbox.states import State
from outbox import publish
from outbox.models import OutboxMessage
from tests.support.aliases import the_default_at
from tests.support.apps.effects.models import Effect, Unique
from tests.support.apps.leased import LEASED_JOB
from tests.support.apps.limited import TOPIC as LIMITED_JOB
from tests.support.apps.worker import JOB
from tests.support.deliveries import A_WHILE, at_once

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

LEASE = timedelta(seconds=4.5)
"""Extended every third of it, so that a stall of two seconds costs none."""
SHORT = timedelta(milliseconds=200)
THREADS = 4
"""As many as a pool has connections by default."""
MANY = 30


@pytest.fixture
def workers(a_process):
    """`outbox_relay` and `inbox_consume` of a project whose databases have a pool."""
    given = {"app": "pooled", "variables": {"LEASE_SECONDS": str(LEASE.total_seconds())}, "CONCURRENCY": THREADS + 1}
    outbox = {"BACKOFF": (SHORT, SHORT), "POLL_INTERVAL": SHORT}
    with ExitStack() as stack:
        names = ("inbox_consume", "outbox_relay")
        processes = [stack.enter_context(a_process(name, outbox=outbox, **given)) for name in names]
        yield processes
        for process in processes:
            assert process.end() == 0


def publish_many(topic, payload, count):
    with transaction.atomic():
        return [publish(topic, payload, biz_id=f"{topic}-{n}").biz_id for n in range(count)]


def test_every_kind_of_message_is_handled_once_by_workers_of_a_pooled_database(workers):
    consumer, _ = workers
    leased = publish_many(LEASED_JOB, {"do": "wait for the word"}, THREADS)
    # Every thread but one runs it, has its connection, and has its lease extended all the same.
    consumer.until(lambda: all(it_was_extended_twice(name) for name in leased))
    for name in leased:
        Unique.objects.create(name=f"go {name}")
    others = publish_many(LIMITED_JOB, {"kind": "order"}, MANY) + publish_many(JOB, {}, MANY)
    consumer.until(lambda: InboxMessage.objects.filter(state=State.DONE).count() == THREADS + 2 * MANY)

    ran = Effect.objects.exclude(name__startswith="begun ")
    assert sorted(ran.values_list("name", flat=True)) == sorted(leased + others)
    assert set(InboxMessage.objects.values_list("attempts", flat=True)) == {1}


def it_was_extended_twice(name):
    row = InboxMessage.objects.filter(biz_id=name, state=State.RUNNING).first()
    return row is not None and row.next_attempt_at > row.received_at + 1.5 * LEASE


@contextmanager
def pooled(**pool):
    with the_default_at(OPTIONS={**connection.settings_dict["OPTIONS"], "pool": pool}):
        try:
            yield
        finally:
            connection.close()
            connection.close_pool()


def test_web_threads_that_share_one_pooled_connection_publish_and_wake_the_relays():
    def request(number):
        with transaction.atomic():
            published = publish("shop.order.placed", {"n": number})
        close_old_connections()
        return published.id

    with psycopg.connect(direct(), autocommit=True) as relay, pooled(min_size=1, max_size=1):
        relay.execute("LISTEN outbox_doorbell")
        ids = at_once([lambda n=n: request(n) for n in range(5)])
        rung = next(relay.notifies(timeout=A_WHILE, stop_after=1), None)

    assert set(OutboxMessage.objects.values_list("message_id", flat=True)) == set(ids)
    assert rung


def direct():
    """The database, past any pool."""
    given = connection.get_connection_params()
    return psycopg.conninfo.make_conninfo(**{name: given[name] for name in ("dbname", "user", "host", "port")})

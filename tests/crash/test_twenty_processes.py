"""Twenty processes and one biz-id: a hundred copies, all of them prefetched at the same time, and one effect."""

from collections import Counter
from contextlib import ExitStack
from datetime import timedelta

import kombu
import pytest
from django.db import transaction

from inbox.leases.stores import lease_store
from inbox.models import InboxMessage
from inbox.operators import accounting
from inbox.receiving.reading import read
from inbox.states import State
from inbox.store import arrivals
from tests.support.apps.effects.models import Effect, Unique
from tests.support.apps.leased import LEASED_JOB
from tests.support.apps.worker import JOB
from tests.support.deliveries import OPTIONS, an_envelope, the_row
from tests.support.sql import executed
from tests.support.waiting import wait_until
from tests.support.workers import (
    CONFIRMED,
    EXCHANGE,
    LEASED_OF_THE_WORKERS,
    OF_THE_WORKERS,
    Process,
    as_environment,
    broker_options,
    declare,
    length_of,
)

PROCESSES = 20
IN_HAND = 5
COPIES = PROCESSES * IN_HAND
STARTING_SECONDS = 180.0
"""Twenty interpreters on two cores."""

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.timeout(400)]


@pytest.fixture
def processes(process_environment, rabbitmq_url, tmp_path):
    """All of them, each with one worker and five copies at most, and known to PostgreSQL by its name."""

    def start(stack, settings, **given):
        given = {"GROUP": "tests", "EXCHANGE": EXCHANGE, "CONCURRENCY": 1, "PREFETCH": IN_HAND, **given}
        environment = {
            **process_environment,
            **as_environment(INBOX={"BROKER_URL": rabbitmq_url, **given}, OUTBOX={"BROKER_URL": rabbitmq_url}),
            "DJANGO_SETTINGS_MODULE": settings,
            "LEASE_SECONDS": "60",  # no process is killed, and with so many of them the owner may renew a short lease too late
        }
        return [
            stack.enter_context(Process({**environment, "PGAPPNAME": name}, tmp_path / f"{name}.log", "inbox_consume"))
            for name in (f"consumer-{number}" for number in range(PROCESSES))
        ]

    return start


def send_copies(url, topic, payload):
    """Half of them were sent twice by a relay, the others were published again."""
    with kombu.Connection(url, transport_options=CONFIRMED) as connection:
        producer = kombu.Producer(connection.default_channel, kombu.Exchange(EXCHANGE, "topic", durable=True))
        for number in range(COPIES):
            producer.publish(
                payload,
                routing_key=topic,
                serializer="json",
                delivery_mode=2,
                message_id="first" if number < COPIES // 2 else f"again-{number}",
                headers={"cloudEvents:bizid": "one"},
            )


def processes_that_wait_for_a_lock():
    waiting = "application_name LIKE 'consumer-%%' AND wait_event_type = 'Lock'"
    return {*executed(f"SELECT application_name FROM pg_stat_activity WHERE {waiting}", [], using="other")}


def all_end(processes):
    for process in processes:
        process.terminate()
    assert [process.ends() for process in processes] == [0] * PROCESSES, [process.said() for process in processes]


def test_duplicates_in_twenty_processes_that_wait_for_the_same_row_have_one_effect(processes, rabbitmq_server, rabbitmq_url):
    """The test holds the row until each process waits for it, and then rolls back: one of twenty gets it."""
    options = broker_options(rabbitmq_url)
    declare(OF_THE_WORKERS, options)
    send_copies(rabbitmq_url, JOB, {})
    row = read(OF_THE_WORKERS, an_envelope(topic=JOB, biz_id="one"), OPTIONS).row
    with ExitStack() as stack:
        with transaction.atomic():
            assert arrivals.begin_fresh("default", [row], OPTIONS.DUPLICATE_TIMEOUT)
            consumers = processes(
                stack, "tests.support.apps.worker.settings", DUPLICATE_TIMEOUT=timedelta(seconds=2 * STARTING_SECONDS)
            )
            wait_until(lambda: len(processes_that_wait_for_a_lock()) == PROCESSES, STARTING_SECONDS)
            transaction.set_rollback(True)
        wait_until(lambda: length_of(rabbitmq_server, OF_THE_WORKERS, options) == 0)
        wait_until(lambda: InboxMessage.objects.count() == 1)
        all_end(consumers)

    assert list(Effect.objects.values_list("name", "detail")) == [("one", "1")]
    assert the_row().attempts == 1
    assert_accounted_for(the_row(), counted_elsewhere={})


@pytest.mark.parametrize("leases", ["database", "redis"])
def test_duplicates_in_twenty_processes_under_a_lease_have_one_run(request, processes, rabbitmq_server, rabbitmq_url, leases):
    """One process runs the message until all others have found its lease."""
    options = broker_options(rabbitmq_url)
    declare(LEASED_OF_THE_WORKERS, options)
    with ExitStack() as stack:
        kept_in = leases if leases == "database" else request.getfixturevalue("redis_url")
        consumers = processes(stack, "tests.support.apps.leased.settings", LEASE_STORE=kept_in)
        wait_until(lambda: all("consumer: receiving from" in consumer.said() for consumer in consumers), STARTING_SECONDS)
        send_copies(rabbitmq_url, LEASED_JOB, {"do": "wait for the word"})
        # What the owner has fetched waits for its only worker.
        wait_until(lambda: length_of(rabbitmq_server, LEASED_OF_THE_WORKERS, options) <= IN_HAND)
        Unique.objects.create(name="go one")
        wait_until(lambda: length_of(rabbitmq_server, LEASED_OF_THE_WORKERS, options) == 0)
        wait_until(lambda: [*InboxMessage.objects.values_list("state", flat=True)] == [State.DONE])
        all_end(consumers)

    assert list(Effect.objects.order_by("id").values_list("name", "detail")) == [("begun one", "1"), ("one", "1")]
    counted = lease_store(broker_options(rabbitmq_url, LEASE_STORE=kept_in)).counts()
    assert_accounted_for(the_row(), counted_elsewhere=counted.get(LEASED_OF_THE_WORKERS.name, {}))


def assert_accounted_for(row, counted_elsewhere):
    """In the row, or in Redis, which counts what comes after the end."""
    elsewhere = Counter(counted_elsewhere)
    assert (row.state, elsewhere["handled"]) == (State.DONE, 0)
    assert 1 + row.duplicates + elsewhere["duplicates"] == COPIES
    assert accounting.balance("default").delivered == COPIES - elsewhere["duplicates"]
    # The copies with the same message id as the row were sent again by a relay, the others by the business. A copy that
    # arrived while another one was being counted was delivered again.
    again = row.resends + row.redeliveries + elsewhere["resend"] + elsewhere["redelivery"]
    assert again == (COPIES // 2 - 1 if row.message_id == "first" else 0)

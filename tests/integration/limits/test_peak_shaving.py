"""Two real consumers share one rate limit: it holds for both together, a burst loses nothing and the queue drains."""

import signal
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import kombu
import pytest
from django.db.models import Count

from inbox import Shed
from inbox.consumer.topology import queue_name
from inbox.handlers.handler import Handler
from inbox.models import InboxMessage, TokenBucket
from inbox.states import State
from inbox.store.buckets import lease_tokens
from tests.support.apps.effects.models import Effect
from tests.support.apps.limited import ABOVE, NAME, RATE, TOPIC
from tests.support.deliveries import effects, the_effect
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming, declare, length_of, send_burst

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

A_BURST = 600
BURST_OF_THE_BUCKET = 1 + 0.1 * RATE
HANDLER = Handler(name=NAME, topics=(TOPIC,), function=print, biz_id=None, using="default", rate_limit=RATE, shed=Shed())
"""The handler as far as its queue is concerned; the real function is in the processes."""


@pytest.fixture
def length(rabbitmq_server, rabbitmq_url):
    """How many messages the broker holds, unacknowledged ones included."""
    return lambda: length_of(rabbitmq_server, HANDLER, broker_options(rabbitmq_url))


@pytest.fixture
def two_consumers(a_process, rabbitmq_url):
    """Two consumer processes, both subscribed; the `waiting` messages were in the queue before them."""

    @contextmanager
    def start(waiting=()):
        declare(HANDLER, broker_options(rabbitmq_url))
        send_burst(rabbitmq_url, TOPIC, waiting)
        first, second = (a_process("inbox_consume", app="limited", log=name) for name in ("first", "second"))
        with first, second:
            for process in (first, second):
                process.until(lambda process=process: "consumer: receiving from" in process.said())
            yield first, second

    return start


def sent(kinds):
    """The ids of the messages of a burst."""
    return [f"{kind}-{number}" for number, kind in enumerate(kinds)]


def emptied():
    """Take all tokens of the shared bucket, so that none is left over; the database's clock at that instant."""
    lease_tokens("default", NAME, rate=RATE, burst=BURST_OF_THE_BUCKET, most=A_BURST)
    return TokenBucket.objects.get(handler=NAME).filled_at.timestamp()


def last_settled():
    return InboxMessage.objects.latest("settled_at").settled_at.timestamp()


def what_is_stored():
    """The effects, and the rows by what became of them."""
    columns = ("state", "attempts", "duplicates", "last_error")
    return effects(), *InboxMessage.objects.values_list(*columns).annotate(Count("pk"))


def test_rate_limit_holds_for_two_consumers_together_and_the_backlog_drains(two_consumers, rabbitmq_url, length):
    with two_consumers() as consumers:
        begun = emptied()
        send_burst(rabbitmq_url, TOPIC, ["order"] * A_BURST)
        wait_until(lambda: length() == 0)
        # Deliveries that wait for a token near the acknowledgement timeout are stored, and run by the runner.
        wait_until(lambda: effects() == A_BURST, report=what_is_stored)
        for consumer in consumers:
            assert consumer.end() == 0

    assert effects() == A_BURST
    assert set(InboxMessage.objects.values_list("state", "duplicates")) == {(State.DONE, 0)}
    assert RATE * (last_settled() - begun) + 1 >= A_BURST
    assert all("handled" in consumer.said() for consumer in consumers)


def test_killing_one_of_two_consumers_loses_and_repeats_no_message(two_consumers, rabbitmq_url, length):
    with two_consumers() as (first, second):
        begun = emptied()
        send_burst(rabbitmq_url, TOPIC, ["order"] * A_BURST)
        second.until(lambda: effects() > A_BURST / 4)
        first._process.send_signal(signal.SIGKILL)
        assert first.ends() == -signal.SIGKILL
        second.until(lambda: effects() == A_BURST)
        second.until(lambda: length() == 0)

    assert effects() == Effect.objects.values("name").distinct().count() == A_BURST
    assert not InboxMessage.objects.exclude(state=State.DONE).exists()
    # The tokens that the killed process had leased and not used are lost and are not replaced.
    assert RATE * (last_settled() - begun) + 1 >= A_BURST


def in_queue(url):
    """Take the messages that are in the handler's queue now; return their ids."""
    with kombu.Connection(url) as connection:
        queue = kombu.Queue(queue_name(HANDLER, broker_options(url)), no_declare=True)(connection.default_channel)
        return [message.properties["message_id"] for message in iter(lambda: queue.get(no_ack=True), None)]


def test_two_consumers_shed_only_droppable_messages_and_only_above_the_limit(two_consumers, rabbitmq_url, length):
    kinds = ([*["view"] * 9, "order"] * ABOVE)[: ABOVE * 3 // 2]
    with two_consumers(waiting=kinds) as (first, second):
        first.until(lambda: InboxMessage.objects.filter(state=State.SHED).exists())
        first.until(lambda: length() <= ABOVE)
        for consumer in (first, second):
            assert consumer.end() == 0

    stored = set(InboxMessage.objects.values_list("message_id", flat=True))
    waiting = []
    # Both may have a message: what one consumer has returned, the other may have stored for later before it ended, and RabbitMQ
    # forgets acks that come shortly before their channel is closed (rabbitmq-server#10327).
    wait_until(lambda: waiting.extend(in_queue(rabbitmq_url)) or stored.union(waiting) == set(sent(kinds)))

    dropped = InboxMessage.objects.filter(state=State.SHED).count()
    assert len(waiting) == len(set(waiting))
    handled = InboxMessage.objects.filter(state=State.DONE).values_list("message_id", flat=True)
    assert sorted(Effect.objects.values_list("name", flat=True)) == sorted(handled), "each of them once"
    # Both together stop soon after nine tenths of the limit, long before the droppable messages are exhausted.
    assert 0 < dropped <= len(kinds) - 0.5 * ABOVE < kinds.count("view")
    assert not InboxMessage.objects.filter(state=State.SHED, message_id__startswith="order").exists()


def test_deliveries_waiting_for_a_low_rate_are_stored_before_the_ack_timeout(handles, rabbitmq_url, rabbitmq_server):
    handler = handles(the_effect, topic=TOPIC, rate_limit="1/h")
    options = broker_options(rabbitmq_url)
    declare(handler, options)
    send_burst(rabbitmq_url, TOPIC, ["order"] * 4)

    with consuming([handler], options) as consumer:
        wait_until(lambda: effects() == 1)
        # Set only now: with a short timeout from the start, a stall would make the first message stale as well.
        consumer._options = consumer._reception._options = consumer._subscriptions._options = replace(
            options, ACK_TIMEOUT=timedelta(seconds=2)
        )
        wait_until(lambda: length_of(rabbitmq_server, handler, options) == 0)

    # The first message took the token that a new bucket has.
    assert dict(InboxMessage.objects.values_list("state").annotate(Count("id"))) == {State.DONE: 1, State.RECEIVED: 3}
    assert set(InboxMessage.objects.values_list("duplicates", "redeliveries")) == {(0, 0)}
    assert effects() == 1

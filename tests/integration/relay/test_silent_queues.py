"""A queue of RabbitMQ that confirms nothing: the messages of other topics go on, and its own arrive when it works again."""

from contextlib import contextmanager

import pytest

from outbox.models import OutboxMessage, PausedTopic
from outbox.states import State
from tests.support.relaying import Queue, all_published, drained, ids, published, published_many, relaying
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]

SILENT, OTHER = "shop.silent", "shop.other"
PROCESS = (
    '[begin {N, _} = amqqueue:get_pid(Q), sys:%s(whereis(N)) end || Q <- rabbit_amqqueue:list(<<"%s">>), '
    'element(4, amqqueue:get_name(Q)) =:= <<"silent">>].'
)


@pytest.fixture
def suspended(rabbitmq_server, rabbitmq_url):
    """Suspend the process of the quorum queue "silent", as if it had lost its majority, for `with`."""
    vhost = rabbitmq_url.rpartition("/")[2]

    @contextmanager
    def suspend():
        rabbitmq_server.evaluate(PROCESS % ("suspend", vhost))
        try:
            yield
        finally:
            rabbitmq_server.evaluate(PROCESS % ("resume", vhost))

    return suspend


@pytest.fixture
def queues(rabbitmq_url):
    with (
        Queue(rabbitmq_url, SILENT, "silent", **{"x-queue-type": "quorum"}) as silent,
        Queue(rabbitmq_url, OTHER, "other", **{"x-queue-type": "quorum"}) as other,
    ):
        yield silent, other


@pytest.mark.parametrize("before", [True, False], ids=["suspended while it is in use", "suspended from the start"])
@pytest.mark.parametrize("relays", [1, 2])
def test_other_topics_go_on_beside_a_queue_that_confirms_nothing(rabbitmq_url, queues, suspended, before, relays):
    """Without a publish before, RabbitMQ answers nothing on the channel, whatever the queue."""
    silent, other = queues
    with relaying(rabbitmq_url, relays=relays):
        first = [published(topic) for topic in ((SILENT, OTHER) if before else (OTHER,))]
        wait_until(lambda: all_published(first))
        with suspended():
            messages = [published(topic, key=key) for key in ("", "k") for topic in (SILENT, OTHER) * 20]
            messages += published_many(700, SILENT)
            for _ in range(50):
                messages.append(published(OTHER, key="k"))
                wait_until(lambda: OutboxMessage.objects.filter(topic=OTHER, state=State.READY).count() == 0)
            wait_until(PausedTopic.objects.filter(topic=SILENT).exists)
            messages.append(published(OTHER))
            wait_until(lambda: all_published(messages[-1:]))
        wait_until(lambda: all_published(messages))
        wait_until(lambda: not PausedTopic.objects.exists())

    assert set(OutboxMessage.objects.values_list("attempts", flat=True)) == {1}
    arrived = ids(silent.take_all()) + ids(other.take_all())
    assert set(arrived) == set(ids([*first, *messages]))


def test_drain_ends_beside_a_queue_that_confirms_nothing_and_the_next_one_sends_its_messages(
    rabbitmq_url, queues, suspended, monkeypatch
):
    monkeypatch.setattr("outbox.transports.amqp._LATEST_SECONDS", 2.0)
    messages = [published(SILENT) for _ in range(5)]
    with suspended():
        drained(rabbitmq_url)
    assert not all_published(messages)

    with relaying(rabbitmq_url):
        wait_until(lambda: all_published(messages))

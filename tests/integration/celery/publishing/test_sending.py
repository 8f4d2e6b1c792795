"""Messages in the form of another protocol on real brokers: to queues and exchanges that exist, and to others."""

import uuid
from contextlib import contextmanager

import kombu
import pytest

from exactly_once.transport.interface import OutgoingMessage, PublishOutcome
from exactly_once.wire.envelope import Envelope
from exactly_once.wire.formats import Wire
from tests.support.relaying import TOPIC, Queue, connected, outcomes, soon

TASKS = kombu.Exchange("tasks", "direct")
NESTED = {"none": None, "list": [1, 2.5, True, {"deep": ["x"]}], "text": "ä 🍰", "nul": "a\0b", "big": 2**40}


def a_wire(**changes):
    values = {
        "exchange": "",
        "exchange_type": "direct",
        "routing_key": "work",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "priority": 0,
        "headers": {"task": "shop.work", "id": "1", **NESTED},
        "properties": {"correlation_id": "1", "reply_to": "me", "delivery_mode": 2},
    }
    return Wire(**{**values, **changes})


def a_task(position=1, body=b"[[], {}, {}]", **changes):
    envelope = Envelope(id=str(uuid.uuid4()), topic="celery.shop.work", body=body)
    return OutgoingMessage(position=position, envelope=envelope, wire=a_wire(**changes).to_text())


def an_event(position=1):
    return OutgoingMessage(position=position, envelope=Envelope(id=str(uuid.uuid4()), topic=TOPIC, body=b"{}"))


def work_queue(url, exchange=TASKS, routing_key="work"):
    """A queue for tasks on a real broker, bound to the exchange `tasks`, too."""
    return Queue(url, routing_key, "work", exchange)


class TestEveryBroker:
    def test_messages_and_events_are_confirmed_in_one_batch(self, broker):
        with work_queue(broker) as work, Queue(broker) as queue, connected(broker) as transport:
            sent = transport.send([an_event(1), a_task(2), an_event(3), a_task(4, exchange="tasks")], soon())
            queue.take(2)
            work.take(2)

        assert outcomes(sent) == dict.fromkeys((1, 2, 3, 4), PublishOutcome.CONFIRMED)

    @pytest.mark.parametrize("body", [b"", b"\x80\x04\xff\x00", b"x" * 300_000], ids=["empty", "bytes", "large"])
    def test_any_body_is_carried(self, broker, body):
        with work_queue(broker) as work, connected(broker) as transport:
            transport.send([a_task(body=body, content_type="application/x-anything", content_encoding="binary")], soon())
            [message] = work.take(1)

        assert (message.body or b"") == body

    def test_topic_exchange_routes_the_message_or_it_is_returned(self, broker):
        topics = kombu.Exchange("topics", "topic")
        with work_queue(broker, topics, "shop.#") as work, connected(broker) as transport:
            of_topics = {"exchange": "topics", "exchange_type": "topic"}
            sent = transport.send(
                [a_task(1, routing_key="shop.order.work", **of_topics), a_task(2, routing_key="bank.work", **of_topics)], soon()
            )
            work.take(1)

        assert outcomes(sent) == {1: PublishOutcome.CONFIRMED, 2: PublishOutcome.RETURNED}
        assert "no queue is bound to exchange 'topics' for topic 'bank.work'" in sent.verdicts[2].reason

    def test_message_to_a_missing_exchange_is_returned_and_the_rest_of_the_batch_is_confirmed(self, broker):
        missing = f"missing-{uuid.uuid4()}"
        with work_queue(broker) as work, Queue(broker) as queue, connected(broker) as transport:
            messages = [a_task(1), a_task(2, exchange=missing), an_event(3), a_task(4, exchange=missing), a_task(5)]
            sent = transport.send(messages, soon())
            again = transport.send([an_event(6), a_task(7)], soon())
            work.take(3)
            queue.take(2)

        returned, confirmed = PublishOutcome.RETURNED, PublishOutcome.CONFIRMED
        assert outcomes(sent) == {1: confirmed, 2: returned, 3: confirmed, 4: returned, 5: confirmed}
        assert missing in sent.verdicts[2].reason
        assert sent.broken is None
        assert outcomes(again) == {6: confirmed, 7: confirmed}

    @pytest.mark.parametrize(
        "wire",
        ["", "{", "[]", "{}", '{"exchange": 1}', "[" * 100_000],
        ids=["empty text", "truncated", "list", "empty object", "wrong type", "deep"],
    )
    def test_unreadable_wire_form_is_refused_and_the_rest_of_the_batch_is_confirmed(self, broker, wire):
        with Queue(broker) as queue, connected(broker) as transport:
            sent = transport.send([an_event(1), a_task(2)._replace(wire=wire), an_event(3)], soon())
            queue.take(2)

        assert outcomes(sent) == {1: PublishOutcome.CONFIRMED, 2: PublishOutcome.REFUSED, 3: PublishOutcome.CONFIRMED}


class TestRabbitMQ:
    def test_message_to_a_missing_queue_is_returned(self, rabbitmq_url):
        with Queue(rabbitmq_url) as queue, connected(rabbitmq_url) as transport:
            sent = transport.send([a_task(1), an_event(2)], soon())
            queue.take(1)

        assert outcomes(sent) == {1: PublishOutcome.RETURNED, 2: PublishOutcome.CONFIRMED}
        assert sent.verdicts[1].reason == "unroutable: queue 'work' does not exist"

    def test_message_to_a_deleted_exchange_is_returned_after_a_reconnect(self, rabbitmq_url):
        with work_queue(rabbitmq_url) as work, connected(rabbitmq_url) as transport:
            transport.send([a_task(exchange="tasks")], soon())
            work.take(1)
            TASKS(work._connection.channel()).delete()
            broken = transport.send([a_task(1, exchange="tasks"), a_task(2)], soon())
            transport.connect()
            after = transport.send([a_task(1, exchange="tasks"), a_task(2)], soon())

        assert (broken.suspected, "404" in broken.broken) == ([1, 2], True)
        assert outcomes(after) == {1: PublishOutcome.RETURNED, 2: PublishOutcome.CONFIRMED}

    def test_message_to_an_exchange_without_write_permission_is_refused_alone(self, rabbitmq_server, rabbitmq_url):
        """RabbitMQ closes the channel for it; sending one by one shows which message it refused."""
        with (
            work_queue(rabbitmq_url),
            writing_only_to(rabbitmq_server, rabbitmq_url, "^outbox$"),
            connected(rabbitmq_url) as transport,
        ):
            both = transport.send([a_task(1), a_task(2)], soon())
            transport.connect()
            alone = transport.send([a_task(1)], soon())
            transport.connect()
            event = transport.send([an_event(3)], soon())

        assert (both.verdicts, both.suspected) == ({}, [1, 2])
        assert outcomes(alone) == {1: PublishOutcome.FORBIDDEN}
        assert "403" in alone.verdicts[1].reason
        assert outcomes(event) == {3: PublishOutcome.RETURNED}


@contextmanager
def writing_only_to(server, url, exchanges):
    """New connections to the virtual host may write to exchanges of these names only."""
    vhost = url.rpartition("/")[2]

    def permit(write):
        given = ", ".join(f'<<"{text}">>' for text in ("guest", vhost, ".*", write, ".*", "guest"))
        server.evaluate(f"rabbit_auth_backend_internal:set_permissions({given}).")

    permit(exchanges)
    try:
        yield
    finally:
        permit(".*")

"""Deliveries keep their bodies as they were sent, whatever their headers ask kombu to make of them."""

import kombu
import pytest

from inbox.consumer.channels import receiving_bodies_as_sent
from inbox.consumer.reception import body_of

BODY = '{"a": "ä"}'


@pytest.fixture
def channel():
    with kombu.Connection("memory://") as connection:
        channel = receiving_bodies_as_sent(connection.channel())
        kombu.Queue("q", channel=channel).declare()
        yield channel
        channel.queue_delete("q")


def one_from(channel):
    received = []
    with kombu.Consumer(channel, [kombu.Queue("q")], on_message=received.append, auto_declare=False):
        channel.connection.client.drain_events(timeout=5)
    (message,) = received
    return message


def publish(channel, body, **properties):
    kombu.Producer(channel).publish(body, routing_key="q", content_type="application/json", **properties)


@pytest.mark.parametrize("encoding", ["utf-8", "idna", "no-such-encoding"])
def test_a_body_is_the_bytes_that_were_sent(channel, encoding):
    publish(channel, BODY.encode(), content_encoding=encoding)

    assert body_of(one_from(channel)) == BODY.encode()


def test_a_compressed_body_stays_compressed_also_when_it_is_requeued(channel):
    publish(channel, BODY, compression="gzip")
    compressed, _ = kombu.compression.compress(BODY, "gzip")

    first = one_from(channel)
    first.requeue()
    again = one_from(channel)

    for message in (first, again):
        assert (body_of(message), message.headers) == (compressed, {"compression": "application/x-gzip"})
    again.ack()


def test_a_body_of_an_unknown_compression_is_received(channel):
    publish(channel, BODY.encode(), headers={"compression": "no-such-thing"}, content_encoding="binary")

    assert body_of(one_from(channel)) == BODY.encode()

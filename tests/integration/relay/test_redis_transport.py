"""Redis through kombu: no confirms, and no silent loss of a message that no queue is bound for."""

import pytest

from exactly_once.transport.interface import OutgoingMessage, PublishOutcome
from exactly_once.wire.envelope import Envelope
from outbox.transports.virtual import capabilities_of
from tests.support.relaying import TOPIC, Queue, connected, ids, outcomes, soon
from tests.support.servers import FaultProxy


def a_message(position=1, topic=TOPIC, **attributes):
    return OutgoingMessage(position=position, envelope=Envelope(id=f"m{position}", topic=topic, body=b"{}", **attributes))


@pytest.fixture
def proxy(redis_server, redis_url):
    with FaultProxy("127.0.0.1", redis_server.port) as proxy:
        yield proxy


class TestRouting:
    def test_queue_bound_later_is_found_without_a_new_connection(self, redis_url):
        with connected(redis_url) as transport:
            assert outcomes(transport.send([a_message()], soon())) == {1: PublishOutcome.RETURNED}
            with Queue(redis_url) as queue:
                assert outcomes(transport.send([a_message()], soon())) == {1: PublishOutcome.CONFIRMED}
                assert ids(queue.take(1)) == ["m1"]


def test_message_that_cannot_be_sent_is_refused_and_the_others_are_confirmed(redis_url):
    with Queue(redis_url) as queue, connected(redis_url) as transport:
        sent = transport.send([a_message(1), a_message(2, headers={"x": object()}), a_message(3)], soon())

        assert outcomes(sent) == {1: PublishOutcome.CONFIRMED, 2: PublishOutcome.REFUSED, 3: PublishOutcome.CONFIRMED}
        assert ids(queue.take(2)) == ["m1", "m3"]


class TestUnavailableServer:
    def test_server_lost_within_a_batch_keeps_the_messages_it_has_confirmed(self, redis_url, proxy):
        with Queue(redis_url) as queue, connected(proxy.through(redis_url)) as transport:
            transport.send([a_message(0)], soon())
            proxy.cut_after(30_000)
            proxy.refuse()
            batch = [a_message(n, headers={"padding": "x" * 1_000}) for n in range(1, 61)]

            sent = transport.send(batch, soon())

            assert sent.broken
            assert set(outcomes(sent).values()) == {PublishOutcome.CONFIRMED}
            confirmed = {f"m{position}" for position in sent.verdicts}
            assert 0 < len(confirmed) < 60
            assert confirmed <= set(ids(queue.take(len(confirmed) + 1)))
            proxy.accept()
            transport.connect()
            assert outcomes(transport.send([a_message(99)], soon())) == {99: PublishOutcome.CONFIRMED}


class TestCapabilities:
    @pytest.mark.parametrize(
        ("url", "durable", "weakness"),
        [
            *(
                (url, False, "loses messages")
                for url in ("memory://", "filesystem://", "sqla+sqlite:///x", "confluentkafka://h")
            ),
            *((url, True, "no publisher confirms") for url in ("redis://h", "rediss://h", "sentinel://h", "sqs://")),
        ],
    )
    def test_transport_names_its_weakness(self, url, durable, weakness):
        found = capabilities_of(url)
        assert (found.durable, found.confirms, weakness in found.weakness) == (durable, False, True)

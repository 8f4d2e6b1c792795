"""The fake broker, proved against the real client library."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.support.deliveries import A_WHILE
from tests.support.fakes.amqp_peer import FakeAmqpPeer, ProtocolError

kombu = pytest.importorskip("kombu")


class Publisher:
    """A channel in confirm mode, and everything it was told, in order."""

    def __init__(self, url: str, heartbeat: int = 0) -> None:
        self.told: list[tuple[Any, ...]] = []
        callbacks = {"on_blocked": self._on_blocked, "on_unblocked": self._on_unblocked}
        client = kombu.Connection(url, heartbeat=heartbeat, transport_options=callbacks)
        self.connection = client.transport.establish_connection()  # unlike client.connection, tries only once
        self.channel = self.connection.channel()
        self.channel.confirm_select()
        for event in ("basic_ack", "basic_nack"):
            self.channel.events[event].add(partial(self._on_confirm, event.removeprefix("basic_")))
        self.channel.events["basic_return"].add(self._on_return)

    def publish(self, body: bytes = b"hello", headers: dict[str, Any] | None = None, **properties: Any) -> None:
        message = self.channel.prepare_message(body, headers=headers, **properties)
        self.channel.basic_publish(message, exchange="orders", routing_key="order.placed", mandatory=True)

    def drain(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + A_WHILE
        while not until():
            self.connection.drain_events(timeout=deadline - time.monotonic())

    def told_of(self, count: int) -> list[tuple[Any, ...]]:
        self.drain(lambda: len(self.told) >= count)
        return self.told

    def _on_confirm(self, kind: str, tag: int, multiple: bool) -> None:
        self.told.append((kind, tag, multiple))

    def _on_return(self, error: Any, exchange: str, routing_key: str, message: Any) -> None:
        self.told.append(("returned", error.reply_code, exchange, routing_key, message))

    def _on_blocked(self, reason: str) -> None:
        self.told.append(("blocked",))

    def _on_unblocked(self) -> None:
        self.told.append(("unblocked",))


@contextmanager
def connected(peer: FakeAmqpPeer, heartbeat: int = 0) -> Iterator[Publisher]:
    publisher = Publisher(peer.url, heartbeat)
    try:
        yield publisher
    finally:
        publisher.connection.collect()


@pytest.fixture
def peer() -> Iterator[FakeAmqpPeer]:
    with FakeAmqpPeer() as peer:
        yield peer


@pytest.fixture
def publisher(peer: FakeAmqpPeer) -> Iterator[Publisher]:
    with connected(peer) as publisher:
        yield publisher


def test_records_all_of_a_message(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    headers = {"n": 1, "big": 2**40, "s": "é", "f": 0.5, "yes": True, "none": None, "list": [1, "a"], "table": {"x": 1}}
    properties = {"message_id": "m-1", "delivery_mode": 2, "type": "order.placed", "timestamp": 2**33}

    publisher.publish(b"\x00body", headers, properties=properties)

    [published] = peer.wait_for_published(1)
    assert (published.tag, published.exchange, published.routing_key) == (1, "orders", "order.placed")
    assert published.mandatory
    assert published.headers == headers
    assert published.properties == properties
    assert published.body == b"\x00body"


def test_acks_each_message_unless_told_otherwise(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    publisher.publish()
    publisher.publish()

    assert publisher.told_of(2) == [("ack", 1, False), ("ack", 2, False)]


def test_answers_by_hand_may_be_late_out_of_order_doubled_multiple_or_nonsense(
    peer: FakeAmqpPeer, publisher: Publisher
) -> None:
    peer.hold()
    for _ in range(4):
        publisher.publish()
    peer.wait_for_published(4)
    with pytest.raises(TimeoutError):
        publisher.connection.drain_events(timeout=0.01)

    peer.ack(2)
    peer.ack(2)
    peer.nack(3)
    peer.ack(99)
    peer.ack(4, multiple=True)
    peer.nack(0, multiple=True)

    assert publisher.told_of(6) == [
        ("ack", 2, False),
        ("ack", 2, False),
        ("nack", 3, False),
        ("ack", 99, False),
        ("ack", 4, True),
        ("nack", 0, True),
    ]


def test_a_script_answers_each_message(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.script = lambda published: [partial(peer.nack, published)] if published.tag % 2 else [partial(peer.ack, published)] * 2
    publisher.publish()
    publisher.publish()

    assert publisher.told_of(3) == [("nack", 1, False), ("ack", 2, False), ("ack", 2, False)]


def test_a_return_comes_before_its_ack_with_the_message_in_it(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.script = lambda published: [partial(peer.return_message, published), partial(peer.ack, published)]

    publisher.publish(b"lost", headers={"a": 1}, properties={"message_id": "m-1"})

    (*returned, message), ack = publisher.told_of(2)
    assert returned == ["returned", 312, "orders", "order.placed"]
    assert (message.body, message.properties["message_id"], message.headers) == (b"lost", "m-1", {"a": 1})
    assert ack == ("ack", 1, False)


def test_bodies_longer_than_a_frame_travel_both_ways() -> None:
    with FakeAmqpPeer(frame_max=4096) as peer, connected(peer) as publisher:
        peer.script = lambda published: [partial(peer.return_message, published)]
        body = bytes(range(256)) * 100

        publisher.publish(body)
        publisher.publish(b"")

        (*_, first), (*_, second) = publisher.told_of(2)
        assert [published.body for published in peer.published] == [body, b""]
        assert (first.body, second.body) == (body, "")  # an empty body stays the client's default, a str


def test_closing_a_channel_discards_the_rest_of_the_batch(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.script = lambda published: [partial(peer.close_channel, 404, "NOT_FOUND - no exchange")] if published.tag == 2 else []
    publisher.publish()
    publisher.publish()
    peer.wait_for_published(2)
    # basic_publish takes in what has arrived before it writes; this one must not see the close, so it goes around that.
    publisher.connection.client_properties["capabilities"] = {}
    publisher.publish()
    peer.wait_for(lambda: len(peer.discarded) == 1)

    with pytest.raises(publisher.connection.channel_errors, match="no exchange"):
        publisher.told_of(1)

    assert len(peer.published) == 2
    assert publisher.told == []


def test_the_channel_that_the_client_reopens_by_itself_is_not_in_confirm_mode(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.close_channel()
    with pytest.raises(publisher.connection.channel_errors):
        publisher.connection.drain_events(timeout=A_WHILE)
    publisher.publish()
    publisher.channel.confirm_select()
    publisher.publish()

    assert [published.tag for published in peer.wait_for_published(2)] == [0, 1]


def test_an_ack_for_a_message_of_a_dead_connection_has_nowhere_to_go(peer: FakeAmqpPeer) -> None:
    peer.hold()
    with connected(peer) as publisher:
        publisher.publish()
        [old] = peer.wait_for_published(1)
    peer.wait_for(lambda: peer.open_connections == 0)

    with connected(peer) as publisher:
        publisher.publish()
        _, new = peer.wait_for_published(2)

        assert not peer.ack(old)
        assert peer.ack(new)
        assert publisher.told_of(1) == [("ack", 1, False)]
        assert (old.connection, new.connection, peer.connections) == (1, 2, 2)


def test_closing_the_connection_tells_why(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.close_connection(320, "CONNECTION_FORCED - shutdown")

    with pytest.raises(publisher.connection.connection_errors, match="shutdown"):
        publisher.told_of(1)
    peer.wait_for(lambda: peer.open_connections == 0)


def test_dropping_the_connection_resets_it(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.drop()

    with pytest.raises(ConnectionResetError):
        publisher.told_of(1)


def test_a_script_may_drop_the_connection(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.script = lambda published: [peer.drop]
    publisher.publish()

    with pytest.raises(ConnectionResetError):
        publisher.told_of(1)


def test_refusing_connections_until_further_notice(peer: FakeAmqpPeer) -> None:
    peer.refuse_connections = True
    with pytest.raises(ConnectionResetError):
        Publisher(peer.url)

    peer.refuse_connections = False
    with connected(peer):
        assert peer.connections == 1


def test_blocked_and_unblocked(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.blocked("disk")
    peer.unblocked()

    assert publisher.told_of(2) == [("blocked",), ("unblocked",)]


def test_paused_reading_takes_in_nothing_until_resumed(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.pause_reading()
    publisher.publish()
    publisher.publish()
    with pytest.raises(AssertionError, match="in vain"):
        peer.wait_for_published(2, timeout=0.05)

    peer.resume_reading()

    assert publisher.told_of(2) == [("ack", 1, False), ("ack", 2, False)]


def test_silence_with_heartbeats_only() -> None:
    with FakeAmqpPeer(heartbeat=5, heartbeat_every=0.01) as peer, connected(peer, heartbeat=7) as publisher:
        peer.hold()
        publisher.publish()
        started = publisher.connection.bytes_recv
        assert publisher.connection.heartbeat == 5

        # A read that is restarted by every heartbeat would never time out, so read one frame at a time.
        while publisher.connection.bytes_recv < started + 3:
            publisher.connection.blocking_read(timeout=A_WHILE)
        publisher.connection.send_heartbeat()

        peer.wait_for(lambda: peer.heartbeats == 1)
        assert publisher.told == []


def test_a_mute_peer_reads_but_answers_no_method(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.mute = True
    publisher.connection.sock.settimeout(0.05)

    with pytest.raises(TimeoutError):
        publisher.connection.channel()


def test_topology_and_qos_are_agreed_to(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    exchange = kombu.Exchange("orders", type="topic", durable=True)
    queue = kombu.Queue("billing", exchange, routing_key="order.*", queue_arguments={"x-queue-type": "quorum"})

    queue(publisher.channel).declare()
    publisher.channel.basic_qos(0, 10, False)

    assert peer.methods[-4:] == [(40, 10), (50, 10), (50, 20), (60, 10)]


def test_an_orderly_close_is_answered(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    publisher.channel.close()
    publisher.connection.close()

    peer.wait_for(lambda: peer.open_connections == 0)
    assert peer.methods[-2:] == [(20, 40), (10, 50)]


def test_a_breach_of_the_protocol_fails_the_test() -> None:
    peer = FakeAmqpPeer()
    with (
        pytest.raises(AssertionError, match="not part of this fake"),
        peer,
        connected(peer) as publisher,
        pytest.raises(ConnectionResetError),
    ):
        publisher.channel.tx_select()

    assert isinstance(peer.errors[0], ProtocolError)

"""The fake broker, tested with the real client library."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.support.deliveries import A_WHILE
from tests.support.fakes import amqp_wire as wire
from tests.support.fakes.amqp_peer import FakeAmqpPeer, ProtocolError

kombu = pytest.importorskip("kombu")


class Publisher:
    """A channel in confirm mode, and everything the peer answered, in order."""

    def __init__(self, url: str, heartbeat: int = 0) -> None:
        self.answers: list[tuple[Any, ...]] = []
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

    def wait_for_answers(self, count: int) -> list[tuple[Any, ...]]:
        self.drain(lambda: len(self.answers) >= count)
        return self.answers

    def _on_confirm(self, kind: str, tag: int, multiple: bool) -> None:
        self.answers.append((kind, tag, multiple))

    def _on_return(self, error: Any, exchange: str, routing_key: str, message: Any) -> None:
        self.answers.append(("returned", error.reply_code, exchange, routing_key, message))

    def _on_blocked(self, reason: str) -> None:
        self.answers.append(("blocked",))

    def _on_unblocked(self) -> None:
        self.answers.append(("unblocked",))


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


def test_manual_confirms_may_be_late_out_of_order_repeated_multiple_or_for_unknown_tags(
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

    assert publisher.wait_for_answers(6) == [
        ("ack", 2, False),
        ("ack", 2, False),
        ("nack", 3, False),
        ("ack", 99, False),
        ("ack", 4, True),
        ("nack", 0, True),
    ]


def test_a_returned_message_arrives_whole_and_before_its_ack(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.script = lambda published: [partial(peer.return_message, published), partial(peer.ack, published)]

    publisher.publish(b"lost", headers={"a": 1}, properties={"message_id": "m-1"})

    (*returned, message), ack = publisher.wait_for_answers(2)
    assert returned == ["returned", 312, "orders", "order.placed"]
    assert (message.body, message.properties["message_id"], message.headers) == (b"lost", "m-1", {"a": 1})
    assert ack == ("ack", 1, False)


def test_closing_a_channel_discards_messages_published_after_the_close(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.script = lambda published: [partial(peer.close_channel, 404, "NOT_FOUND - no exchange")] if published.tag == 2 else []
    publisher.publish()
    publisher.publish()
    peer.wait_for_published(2)
    # basic_publish takes in what has arrived before it writes; this one must not see the close, so it goes around that.
    publisher.connection.client_properties["capabilities"] = {}
    publisher.publish()
    peer.wait_for(lambda: len(peer.discarded) == 1)

    with pytest.raises(publisher.connection.channel_errors, match="no exchange"):
        publisher.wait_for_answers(1)

    assert len(peer.published) == 2
    assert publisher.answers == []


def test_an_ack_for_a_message_of_a_closed_connection_is_not_sent(peer: FakeAmqpPeer) -> None:
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
        assert publisher.wait_for_answers(1) == [("ack", 1, False)]
        assert (old.connection, new.connection, peer.connections) == (1, 2, 2)


def test_a_peer_that_pauses_reading_receives_nothing_until_it_resumes(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.pause_reading()
    publisher.publish()
    publisher.publish()
    with pytest.raises(AssertionError, match="in vain"):
        peer.wait_for_published(2, timeout=0.05)

    peer.resume_reading()

    assert publisher.wait_for_answers(2) == [("ack", 1, False), ("ack", 2, False)]


def test_a_held_peer_sends_heartbeats_and_no_confirms() -> None:
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
        assert publisher.answers == []


def test_a_mute_peer_reads_but_answers_no_method(peer: FakeAmqpPeer, publisher: Publisher) -> None:
    peer.mute = True
    publisher.connection.sock.settimeout(0.05)

    with pytest.raises(TimeoutError):
        publisher.connection.channel()

    peer.wait_for(lambda: peer.methods[-1] == wire.CHANNEL_OPEN)


def test_an_unsupported_method_fails_the_test_that_uses_the_peer() -> None:
    peer = FakeAmqpPeer()
    with (
        pytest.raises(AssertionError, match="not part of this fake"),
        peer,
        connected(peer) as publisher,
        pytest.raises(ConnectionResetError),
    ):
        publisher.channel.tx_select()

    assert isinstance(peer.errors[0], ProtocolError)

"""The fake broker, with the real client: what no other test would notice. Tests of the transport hold the rest of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.support.deliveries import A_WHILE
from tests.support.fakes.amqp_peer import FakeAmqpPeer, ProtocolError

kombu = pytest.importorskip("kombu")


class Publisher:
    """A channel in confirm mode, and every confirm of the peer, in order."""

    def __init__(self, url: str, heartbeat: int = 0) -> None:
        self.answers: list[tuple[Any, ...]] = []
        client = kombu.Connection(url, heartbeat=heartbeat)
        self.connection = client.transport.establish_connection()  # unlike client.connection, tries only once
        self.channel = self.connection.channel()
        self.channel.confirm_select()
        for event in ("basic_ack", "basic_nack"):
            self.channel.events[event].add(partial(self._on_confirm, event.removeprefix("basic_")))

    def publish(self) -> None:
        message = self.channel.prepare_message(b"hello")
        self.channel.basic_publish(message, exchange="orders", routing_key="order.placed", mandatory=True)

    def wait_for_answers(self, count: int) -> list[tuple[Any, ...]]:
        deadline = time.monotonic() + A_WHILE
        while len(self.answers) < count:
            self.connection.drain_events(timeout=deadline - time.monotonic())
        return self.answers

    def _on_confirm(self, kind: str, tag: int, multiple: bool) -> None:
        self.answers.append((kind, tag, multiple))


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

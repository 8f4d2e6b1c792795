"""Batched acknowledgements: in whatever order deliveries are settled, one that is not settled is never acknowledged."""

import pytest
from amqp import spec
from hypothesis import given
from hypothesis import strategies as st

from inbox.consumer.answers import Acks


class Channel:
    """The broker's side of one channel: which deliveries are outstanding, acknowledged and requeued."""

    def __init__(self):
        self.outstanding = []
        self.acked = []
        self.requeued = []
        self.frames = []

    def deliver(self, tag):
        self.outstanding.append(tag)
        return Delivered(self, tag)

    def send_method(self, method, _format, arguments):
        assert method == spec.Basic.Nack
        tag, multiple, requeue = arguments
        assert (multiple, requeue) == (False, True)
        self.outstanding.remove(tag)
        self.requeued.append(tag)

    def basic_ack(self, tag, multiple=False):
        assert tag in self.outstanding, f"delivery {tag} is not outstanding, and a broker closes the channel for such an ack"
        answered = [one for one in self.outstanding if one <= tag] if multiple else [tag]
        self.acked += answered
        self.outstanding = [one for one in self.outstanding if one not in answered]
        self.frames.append((tag, multiple))


class Delivered:
    def __init__(self, channel, tag):
        self._channel = channel
        self.delivery_tag = tag

    def requeue(self):
        self._channel.outstanding.remove(self.delivery_tag)
        self._channel.requeued.append(self.delivery_tag)


class Client:
    """A channel, the acks under test, and deliveries 1, 2, 3, … on it."""

    def __init__(self, count, *, multiple=True):
        self.channel = Channel()
        self.acks = Acks(self.channel, multiple=multiple)
        self.messages = {}
        for _ in range(count):
            self.delivered()

    def delivered(self):
        tag = len(self.messages) + 1
        self.messages[tag] = self.channel.deliver(tag)
        self.acks.delivered(self.messages[tag])

    def settle(self, *tags):
        for tag in tags:
            self.acks.settle(self.messages[tag])
        self.acks.flush()


def test_a_multiple_ack_spans_deliveries_that_were_acknowledged_one_by_one_before():
    client = Client(5)
    client.settle(2, 4)

    client.settle(1, 3)

    assert client.channel.frames[-1] == (3, True)
    assert client.channel.outstanding == [5]


def test_one_flush_sends_a_multiple_ack_for_the_front_and_single_acks_behind_a_gap():
    client = Client(6)

    client.settle(5, 2, 1)

    assert client.channel.frames == [(2, True), (5, False)]
    assert client.channel.outstanding == [3, 4, 6]


def test_a_requeued_delivery_does_not_hold_back_the_multiple_ack():
    client = Client(3)
    client.acks.requeue(client.messages[1])

    client.settle(2, 3)

    assert client.channel.frames == [(3, True)]
    assert (client.channel.acked, client.channel.requeued, len(client.acks)) == ([2, 3], [1], 0)


@pytest.mark.long
@pytest.mark.parametrize("multiple", [True, False])
@given(data=st.data())
def test_in_any_order_exactly_the_settled_deliveries_are_acknowledged_once(data, multiple):
    client = Client(0, multiple=multiple)
    settled, requeued = set(), set()
    for _ in range(data.draw(st.integers(1, 15))):
        for _ in range(data.draw(st.integers(0, 4))):
            client.delivered()
        unsettled = sorted(set(client.messages) - settled - requeued)
        answered = data.draw(st.permutations(unsettled)) if unsettled else []
        answered = answered[: data.draw(st.integers(0, len(answered)))]
        for tag in answered:
            if data.draw(st.integers(0, 5)) == 0:
                client.acks.requeue(client.messages[tag])
                requeued.add(tag)
            else:
                client.acks.settle(client.messages[tag])
                settled.add(tag)
        if data.draw(st.booleans()):
            client.acks.flush()

    client.acks.flush()

    assert sorted(client.channel.acked) == sorted(settled)
    assert sorted(client.channel.requeued) == sorted(requeued)
    assert client.channel.outstanding == sorted(set(client.messages) - settled - requeued)
    assert len(client.acks) == len(client.channel.outstanding)

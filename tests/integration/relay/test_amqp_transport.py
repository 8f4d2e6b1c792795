"""The AMQP transport against valid and invalid answers of a broker: only what was confirmed counts as confirmed."""

import re
import threading
from functools import partial

import kombu
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exactly_once.process.clock import monotonic
from exactly_once.transport.interface import BrokerUnavailable, OutgoingMessage, PublishOutcome
from exactly_once.wire.envelope import Envelope
from outbox.transports import amqp
from outbox.transports.amqp import AmqpTransport
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.fakes.amqp_wire import CONFIRM_SELECT
from tests.support.relaying import EXCHANGE, TOPIC, connected, deadline_when, ids, outcomes, soon
from tests.support.waiting import wait_until

A_MOMENT = 0.3
"""A deadline for a broker that answers nothing at all."""
LONGER_THAN_A_STALL = 3.0
"""A deadline for a broker that answers some messages and never pauses."""
AN_HOUR = 3600.0

CONFIRMED, RETURNED = PublishOutcome.CONFIRMED, PublishOutcome.RETURNED
NACKED, REFUSED = PublishOutcome.NACKED, PublishOutcome.REFUSED


def messages(count, *, first=1, **attributes):
    return [
        OutgoingMessage(
            position=position, envelope=Envelope(**{"id": f"m{position}", "topic": TOPIC, "body": b"{}", **attributes})
        )
        for position in range(first, first + count)
    ]


def news_of(transport):
    return {position: verdict.outcome for position, verdict in transport.news().items()}


def when_all_have_arrived(peer, count, *actions):
    """The broker answers once the whole batch has arrived."""

    def script(message):
        return actions if len(peer.published) == count else []

    peer.script = script


class TestBatch:
    def test_whole_batch_is_sent_before_the_first_confirm(self, peer, transport):
        when_all_have_arrived(peer, 50, partial(peer.ack, 50, multiple=True))

        sent = transport.send(messages(50), soon())

        assert outcomes(sent) == dict.fromkeys(range(1, 51), CONFIRMED)
        assert sent.broken is None


class TestConfirms:
    @pytest.mark.long
    def test_missed_deadline_closes_the_connection_of_a_broker_that_answers_nothing(self, peer, transport):
        peer.hold()
        peer.mute = True

        assert outcomes(transport.send(messages(1), monotonic() + A_MOMENT)) == {}

        with pytest.raises(BrokerUnavailable, match="within the deadline, and does not answer"):
            transport.connect()
        peer.wait_for(lambda: peer.open_connections == 0)
        assert news_of(transport) == {1: PublishOutcome.UNKNOWN}

    def test_answers_after_the_deadline_are_news_and_are_credited_to_no_other_message(self, peer, transport):
        peer.hold()
        with deadline_when(transport, lambda: len(peer.published) == 3):
            sent = transport.send(messages(3), soon())
        assert (outcomes(sent), sorted(sent.awaited)) == ({}, [1, 2, 3])
        transport.connect()
        peer.ack(1)
        peer.return_message(2)
        peer.ack(2)
        peer.script = lambda message: [partial(peer.nack if message.tag == 4 else peer.ack, message)]

        assert outcomes(transport.send(messages(1, first=4), soon())) == {4: NACKED}, "py-amqp would credit a late ack to it"
        assert news_of(transport) == {1: CONFIRMED, 2: RETURNED}
        assert news_of(transport) == {}
        assert outcomes(transport.send(messages(1, first=2), soon())) == {2: CONFIRMED}, "the next attempt"
        assert peer.connections == 1

    def test_late_answer_is_not_that_of_a_message_that_is_sent_at_its_position(self, peer, transport):
        self.send_in_vain(peer, transport)
        peer.script = lambda message: [partial(peer.ack, 1), partial(peer.nack, message)]

        assert outcomes(transport.send(messages(1, id="other"), soon())) == {1: NACKED}
        assert news_of(transport) == {}

    def test_answer_that_came_while_this_process_was_frozen_is_news(self, peer, transport, monkeypatch):
        self.send_in_vain(peer, transport)
        peer.ack(1)
        monkeypatch.setattr(amqp, "monotonic", lambda: monotonic() + AN_HOUR)

        assert news_of(transport) == {1: CONFIRMED}
        assert peer.connections == 1

    def test_connection_is_kept_while_every_answer_comes_in_time_although_one_is_always_awaited(
        self, peer, transport, monkeypatch
    ):
        self.send_in_vain(peer, transport)
        passed = [0.0]
        monkeypatch.setattr(amqp, "monotonic", lambda: monotonic() + passed[0])
        for position in (2, 3, 4, 5):
            assert outcomes(transport.send(messages(1, first=position), soon() + passed[0], ends_early=True)) == {}
            transport.connect()
            passed[0] += 0.4 * amqp._LATEST_SECONDS
            peer.ack(position - 1)
            assert news_of(transport) == {position - 1: CONFIRMED}
        assert peer.connections == 1

        passed[0] += amqp._LATEST_SECONDS
        assert news_of(transport) == {5: PublishOutcome.UNKNOWN}

    def test_probe_is_answered_beside_a_channel_that_answers_nothing_and_is_replaced(self, peer, transport):
        """As RabbitMQ does while the process of the channel waits for a queue."""
        peer.stuck = 1
        self.send_in_vain(peer, transport)
        peer.script = lambda message: [partial(peer.ack, message)]

        assert outcomes(transport.probe(*messages(1, first=2), soon())) == {2: CONFIRMED}
        assert news_of(transport) == {1: PublishOutcome.UNKNOWN}, "it is sent again, on another channel"
        assert outcomes(transport.send(messages(1), soon())) == {1: CONFIRMED}
        assert [message.channel == peer.stuck for message in peer.published] == [True, False, False]
        assert peer.connections == 1

    def test_channel_that_answers_but_does_not_confirm_is_kept_and_asked_once(self, peer, transport):
        self.send_in_vain(peer, transport)
        asked = peer.methods.count(CONFIRM_SELECT)

        transport.idle()
        assert news_of(transport) == {}
        peer.ack(1)

        wait_until(lambda: news_of(transport) == {1: CONFIRMED})
        assert peer.methods.count(CONFIRM_SELECT) == asked

    @pytest.mark.parametrize("is_answered", [True, False])
    def test_message_that_closes_the_channel_is_sought_among_its_batch_unless_an_earlier_one_may_be_the_cause(
        self, peer, transport, is_answered
    ):
        self.send_in_vain(peer, transport)
        if is_answered:
            peer.ack(1)
        when_all_have_arrived(peer, 3, partial(peer.close_channel, 406, "PRECONDITION_FAILED"))

        sent = transport.send(messages(2, first=2), soon())

        assert (sent.suspected, sent.suspicious) == (([2, 3], False) if is_answered else ([], True))

    def send_in_vain(self, peer, transport):
        peer.hold()
        with deadline_when(transport, lambda: peer.published):
            assert outcomes(transport.send(messages(1), soon())) == {}
        transport.connect()


class TestEndOfAConnection:
    @pytest.mark.parametrize(
        ("end", "reason"),
        [
            (lambda peer: peer.close_channel(404, "NOT_FOUND - no exchange"), "NOT_FOUND"),
            (lambda peer: peer.close_connection(320, "CONNECTION_FORCED - shutdown"), "CONNECTION_FORCED"),
            (lambda peer: peer.drop(), "reset|closed"),
        ],
        ids=["closed channel", "closed connection", "dropped"],
    )
    def test_connection_ended_within_a_batch_keeps_the_verdicts_already_given(self, peer, transport, end, reason):
        answers = [partial(peer.ack, 1), partial(peer.nack, 2), partial(peer.return_message, 3), partial(peer.ack, 3)]
        when_all_have_arrived(peer, 6, *answers, partial(peer.ack, 5), partial(end, peer))

        sent = transport.send(messages(6), soon())

        assert outcomes(sent) == {1: CONFIRMED, 2: NACKED, 3: RETURNED, 5: CONFIRMED}
        assert re.search(reason, sent.broken)
        peer.wait_for(lambda: peer.open_connections == 0)

    def test_next_connection_begins_at_tag_1_in_confirm_mode(self, peer, transport):
        when_all_have_arrived(peer, 2, peer.close_channel)
        transport.send(messages(2), soon())
        peer.script = None
        transport.connect()

        sent = transport.send(messages(1, first=3), soon())

        assert outcomes(sent) == {3: CONFIRMED}
        assert (peer.published[-1].connection, peer.published[-1].tag) == (2, 1)

    @pytest.mark.parametrize(
        ("code", "of", "is_refused"),
        [
            *((code, 1, True) for code in (311, 406, 501, 502, 505)),
            *((code, 1, False) for code in (320, 404, 541)),
            (406, 3, False),
        ],
    )
    def test_channel_closed_over_a_single_message_for_its_content_refuses_that_message(
        self, peer, transport, code, of, is_refused
    ):
        peer.script = lambda message: [partial(peer.close_channel, code, "BECAUSE OF YOU")] if message.tag == of else []

        sent = transport.send(messages(of), soon())

        assert outcomes(sent) == ({1: REFUSED} if is_refused else {})
        assert not is_refused or "BECAUSE OF YOU" in sent.verdicts[1].reason
        assert (of in sent.suspected) == (code == 406 or is_refused)

    def test_channel_closed_over_the_only_message_without_a_confirm_refuses_that_message(self, peer, transport):
        when_all_have_arrived(
            peer, 3, partial(peer.ack, 1), partial(peer.ack, 3), partial(peer.close_channel, 406, "ONE OF YOU")
        )

        sent = transport.send(messages(3), soon())

        assert outcomes(sent) == {1: CONFIRMED, 2: REFUSED, 3: CONFIRMED}

    def test_first_message_of_the_topic_that_the_broker_names_is_forbidden(self, peer, transport):
        refusal = partial(peer.close_channel, 403, "ACCESS_REFUSED - access to topic 'bad' in exchange 'outbox' refused")
        when_all_have_arrived(peer, 5, partial(peer.ack, 1), refusal)

        sent = transport.send([*messages(2), *messages(2, first=3, topic="bad"), *messages(1, first=5)], soon())

        assert outcomes(sent) == {1: CONFIRMED, 3: PublishOutcome.FORBIDDEN}
        assert sent.suspected == [3], "RabbitMQ reads in order, so it never came to the second one"

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            (403, "ACCESS_REFUSED - write access to exchange 'outbox' in vhost '/' refused for user 'guest'"),
            (404, "NOT_FOUND - no exchange 'outbox' in vhost '/'"),
        ],
    )
    def test_forbidden_or_missing_exchange_is_not_attributed_to_a_message(self, peer, transport, code, reason):
        peer.script = lambda message: [partial(peer.close_channel, code, reason)]

        sent = transport.send(messages(1), soon())

        assert (outcomes(sent), list(sent.suspected)) == ({}, [])
        assert "set_permissions" in sent.broken

    def test_connection_lost_unnoticed_gives_the_next_batch_unknown_outcomes(self, peer, transport):
        peer.drop()
        peer.wait_for(lambda: peer.open_connections == 0)

        sent = transport.send(messages(2), soon())

        assert outcomes(sent) == {}
        assert sent.broken


@pytest.mark.long
class TestSilence:
    def test_broker_that_sends_only_heartbeats_does_not_extend_the_deadline(self):
        """Each heartbeat restarts the timeout of py-amqp's own confirms, so they may wait forever."""
        with FakeAmqpPeer(heartbeat=1, heartbeat_every=0.02) as peer, connected(peer.url) as transport:
            peer.script = lambda message: [partial(peer.ack, message)] if message.tag == 1 else []

            sent = transport.send(messages(3), monotonic() + LONGER_THAN_A_STALL)

            assert outcomes(sent) == {1: CONFIRMED}
            assert sorted(sent.awaited) == [2, 3]

    def test_broker_that_reads_nothing_is_given_up_at_the_deadline(self, peer, transport):
        peer.pause_reading()

        sent = transport.send(messages(200, body=b"x" * 100_000), monotonic() + A_MOMENT)

        assert outcomes(sent) == {}
        if sent.broken is None:  # the deadline came between two writes
            with pytest.raises(BrokerUnavailable):
                transport.connect()
        peer.resume_reading()
        peer.wait_for(lambda: peer.open_connections == 0)

    def test_idle_transport_sends_heartbeats_that_keep_the_connection(self):
        # We send one after half an interval of silence; two intervals without one of the peer's end the connection.
        with FakeAmqpPeer(heartbeat=4) as peer, connected(peer.url) as transport:
            while not peer.heartbeats:
                transport.idle()

            assert outcomes(transport.send(messages(1), soon())) == {1: CONFIRMED}
            assert peer.connections == 1


class TestBlockedBroker:
    @pytest.fixture
    def blocked(self, peer, transport):
        """A connection on which the broker has received one message, and then blocks publishers."""
        when_all_have_arrived(peer, 1, peer.blocked)
        transport.send(messages(1), soon())
        peer.script = None
        return transport

    def test_broker_that_blocks_within_a_batch_keeps_its_confirms_and_the_connection(self, peer, transport):
        when_all_have_arrived(peer, 3, partial(peer.ack, 2), peer.blocked)

        sent = transport.send(messages(3), soon())

        assert outcomes(sent) == {2: CONFIRMED}
        assert "blocks publishers" in sent.broken
        assert peer.open_connections == 1

    def test_blocked_broker_is_unavailable_until_the_alarm_ends(self, peer, blocked):
        with pytest.raises(BrokerUnavailable, match="blocks publishers"):
            blocked.connect()
        assert len(peer.published) == 1

        peer.unblocked()
        peer.ack(1)
        connect_when_possible(blocked)
        assert outcomes(blocked.send(messages(1, first=2), soon())) == {2: CONFIRMED}
        assert peer.connections == 1

    @pytest.mark.parametrize("is_dropped", [False, True])
    def test_probe_that_meets_an_alarm_has_an_answer_when_the_alarm_or_the_connection_ends(self, peer, transport, is_dropped):
        when_all_have_arrived(peer, 1, peer.blocked)
        sent = transport.probe(*messages(1), soon())
        assert (sorted(sent.awaited), outcomes(sent)) == ([1], {})
        assert "blocks publishers" in sent.broken

        if is_dropped:
            peer.drop()
            peer.wait_for(lambda: peer.open_connections == 0)
        else:
            peer.unblocked()
            peer.ack(1)
        connect_when_possible(transport)

        assert news_of(transport) == {1: PublishOutcome.UNKNOWN if is_dropped else CONFIRMED}

    def test_blocked_connection_that_is_dropped_is_replaced(self, peer, blocked):
        peer.drop()
        peer.wait_for(lambda: peer.open_connections == 0)

        connect_when_possible(blocked)

        assert outcomes(blocked.send(messages(1, first=2), soon())) == {2: CONFIRMED}

    def test_blocked_connection_is_closed_without_the_close_handshake(self, peer, blocked):
        blocked.close()

        peer.wait_for(lambda: peer.open_connections == 0)
        assert (10, 50) not in peer.methods


def connect_when_possible(transport):
    deadline = soon()
    while True:
        try:
            return transport.connect()
        except BrokerUnavailable:
            assert monotonic() < deadline


class TestConnecting:
    def test_connecting_declares_a_durable_topic_exchange_and_one_of_another_type_is_unavailable(
        self, rabbitmq_url, rabbitmq_server
    ):
        with connected(rabbitmq_url):
            pass
        listed = rabbitmq_server.ctl("list_exchanges", "-p", rabbitmq_url.rpartition("/")[2], "name", "type", "durable")
        assert f"{EXCHANGE}\ttopic\ttrue" in listed

        with kombu.Connection(rabbitmq_url) as connection:
            kombu.Exchange("fanned", "fanout", durable=True)(connection.channel()).declare()
        with pytest.raises(BrokerUnavailable, match=r"PRECONDITION_FAILED|inequivalent"):
            AmqpTransport(rabbitmq_url, alias="default", exchange="fanned").connect()

    @pytest.mark.long
    def test_broker_that_answers_nothing_is_unavailable(self, peer):
        peer.mute = True

        with pytest.raises(BrokerUnavailable):
            AmqpTransport(peer.url, alias="default", exchange=EXCHANGE).connect()


class TestMessageThatCannotBeEncoded:
    """publish() rejects all of these; a row written by other means must not stop the relay."""

    @pytest.mark.parametrize(
        "bad",
        [{"headers": {"x": object()}}, {"headers": {"n" * 300: 1}}, {"topic": "t" * 256}],
        ids=["header value", "header name", "topic"],
    )
    def test_only_the_message_that_cannot_be_encoded_is_refused_in_a_batch(self, peer, transport, bad):
        sent = transport.send([*messages(1), *messages(1, first=2, **bad), *messages(1, first=3)], soon())

        assert outcomes(sent) == {1: CONFIRMED, 2: REFUSED, 3: CONFIRMED}
        assert sent.broken is None
        assert ids(peer.published) == ["m1", "m3"], "nothing of it reached the broker"


answers = st.lists(st.tuples(st.sampled_from(["ack", "nack", "return"]), st.integers(0, 7), st.booleans()), max_size=12)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(answers=answers, end=st.sampled_from(["silence", "close_channel", "close_connection", "drop"]))
def test_any_schedule_of_answers_confirms_exactly_the_acked_messages(answers, end):
    """The same batch of five against any schedule of answers; the model is the specification in one loop."""
    expected, returned = {}, set()
    with FakeAmqpPeer() as peer, connected(peer.url) as transport:
        actions = []
        for kind, tag, multiple in answers:
            if kind == "return":
                if tag in range(1, 6) and tag not in expected:
                    actions.append(partial(peer.return_message, tag))
                    returned.add(tag)
                continue
            actions.append(partial(getattr(peer, kind), tag, multiple=multiple))
            named = [tag] if not multiple else range(1, (tag or 5) + 1)
            for number in named:
                if number in range(1, 6) and number not in expected:
                    outcome = NACKED if kind == "nack" else RETURNED if number in returned else CONFIRMED
                    expected[number] = outcome
        said = threading.Event()
        actions.append(said.set if end == "silence" else getattr(peer, end))
        when_all_have_arrived(peer, 5, *actions)

        with deadline_when(transport, said.is_set):
            sent = transport.send(messages(5), soon())

    assert outcomes(sent) == expected
    assert (sent.broken is None) == (end == "silence" or len(expected) == 5)

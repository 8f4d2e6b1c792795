"""One pass of the relay: claim, send, settle. The rows record what the broker answered."""

import math
from contextlib import suppress
from datetime import timedelta
from functools import partial
from uuid import UUID

import pytest
from django.db import transaction

from exactly_once.sql.now import DatabaseTime
from exactly_once.transport.interface import BrokerUnavailable
from outbox import signals
from outbox.models import OutboxMessage
from outbox.relay.passes import Pass
from outbox.states import State
from outbox.store import looking, settling
from outbox.store.set_aside import Reason
from outbox.topic_pauses import pause
from tests.support.relaying import (
    TOPIC,
    all_published,
    deadline_when,
    ids,
    one_pass,
    published,
    published_many,
    quick,
    row_of,
    set_columns,
    state_of,
    states,
)
from tests.support.signals import listening, recorded_signals

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def signals_sent():
    """The signals that were sent: name, message id, error."""
    names = (f"message_{name}" for name in ("published", "retrying", "dead", "expired"))
    with recorded_signals(*names, of=signals) as sent:
        yield lambda: [
            (name.removeprefix("message_"), UUID(given["message_id"]), given.get("error", "")) for name, given in sent
        ]


def answering(peer, **by_biz_id):
    """Nack, return … the messages with these biz-ids, and ack the others."""

    def script(message):
        answer = by_biz_id.get(message.headers["cloudEvents:bizid"], "ack")
        if answer == "return":
            return [partial(peer.return_message, message), partial(peer.ack, message)]
        if answer == "nothing":
            return []
        if answer == "refuse":
            return [partial(peer.close_channel, 406, "PRECONDITION_FAILED")]
        return [partial(getattr(peer, answer), message)]

    peer.script = script


def sent_in_vain(peer, transport, count=1):
    """A pass whose messages the broker has received by the deadline, and has not answered."""
    with deadline_when(transport, lambda: len(peer.published) == count):
        return one_pass(transport)


def some(*biz_ids, **options):
    return [published(biz_id=biz_id, **options) for biz_id in biz_ids]


@pytest.mark.every_database
class TestConfirmedMessage:
    def test_confirmed_message_is_published(self, peer, transport, signals_sent):
        message = published(payload={"n": "ä"}, key="k", headers={"tenant": "acme"})

        report = one_pass(transport)

        [arrived] = peer.published
        assert (arrived.exchange, arrived.routing_key, arrived.mandatory) == ("outbox", "shop.order.placed", True)
        assert (arrived.body, arrived.properties["message_id"]) == ('{"n":"ä"}'.encode(), str(message.id))
        names = ("tenant", "cloudEvents:orderingkey", "cloudEvents:source")
        assert [arrived.headers[name] for name in names] == ["acme", "k", "/tests"]
        row = row_of(message)
        assert (row.state, row.attempts, row.last_error) == (State.PUBLISHED, 1, "")
        assert row.settled_at is not None
        assert (report.claimed, report.settled, report.published, report.broken) == (1, 1, 1, None)
        assert signals_sent() == [("published", message.id, "")]


@pytest.mark.every_database
class TestFailedAttempt:
    def test_nacked_message_is_retried_after_a_backoff(self, peer, transport, signals_sent, caplog):
        bad, good = some("bad", "good")
        answering(peer, bad="nack")

        report = one_pass(transport, BACKOFF=(timedelta(hours=1), timedelta(hours=9)))

        row = row_of(bad)
        assert (row.state, row.attempts) == (State.RETRYING, 1)
        assert "nack" in row.last_error
        assert timedelta(minutes=29) < row.available_at - row.created_at < timedelta(minutes=62)
        assert state_of(good) == State.PUBLISHED
        assert (report.settled, report.published) == (2, 1)
        assert ("retrying", bad.id, row.last_error) in signals_sent()
        assert "was not published at attempt 1" in caplog.text

    def test_look_returns_the_seconds_until_the_next_retry(self, peer, transport):
        assert looking.look("default").retry_in == math.inf
        later, sooner = some("later", "sooner")
        answering(peer, later="nack", sooner="nack")
        one_pass(transport)
        set_columns(later, available_at=DatabaseTime(timedelta(hours=2)))
        set_columns(sooner, available_at=DatabaseTime(timedelta(hours=1)))
        assert 3500 < looking.look("default").retry_in < 3601
        set_columns(sooner, available_at=DatabaseTime())

        assert looking.look("default").retry_in == 0

    def test_nacked_message_is_sent_again_with_the_same_id_when_due(self, peer, transport):
        [message] = some("bad")
        answering(peer, bad="nack")
        one_pass(transport)
        set_columns(message, available_at=DatabaseTime())
        settling.make_retrying_ready("default", 10)
        answering(peer)

        one_pass(transport)

        row = row_of(message)
        assert (row.state, row.attempts, row.last_error) == (State.PUBLISHED, 2, "")
        assert len(set(ids(peer.published))) == 1, "every resend has the same id"

    def test_last_failed_attempt_makes_the_message_dead(self, peer, transport, signals_sent, caplog):
        [message] = some("bad")
        set_columns(message, attempts=15)
        answering(peer, bad="nack")

        one_pass(transport, MAX_ATTEMPTS=16)

        row = row_of(message)
        assert (row.state, row.attempts) == (State.DEAD, 16)
        assert row.settled_at is not None
        assert signals_sent() == [("dead", message.id, row.last_error)]
        assert "is dead at attempt 16" in caplog.text

    def test_unroutable_message_is_retried_past_max_attempts_with_the_reason(self, peer, transport, signals_sent):
        [message] = some("lost")
        set_columns(message, attempts=500)
        answering(peer, lost="return")

        one_pass(transport, MAX_ATTEMPTS=3, BACKOFF=(timedelta(hours=1), timedelta(hours=9)))

        row = row_of(message)
        assert (row.state, row.attempts) == (State.RETRYING, 501)
        assert "no queue is bound to exchange 'outbox' for topic 'shop.order.placed'" in row.last_error
        assert signals_sent() == [("retrying", message.id, row.last_error)]
        assert row.available_at - row.created_at < timedelta(minutes=2)

    def test_signal_of_a_failed_attempt_is_sent_after_the_commit_and_its_receiver_may_raise(self, peer, transport):
        seen = []

        def receiver(**arguments):
            seen.append((transaction.get_connection().in_atomic_block, OutboxMessage.objects.get().state))
            raise RuntimeError("the receiver's own problem")

        [message] = some("bad")
        answering(peer, bad="nack")
        with listening(signals.message_retrying, receiver):
            one_pass(transport)

        assert seen == [(False, State.RETRYING)]
        assert state_of(message) == State.RETRYING


class TestUnknownOutcome:
    @pytest.mark.parametrize("end", ["close_channel", "drop"])
    def test_unknown_outcome_leaves_the_row_ready_and_settles_the_others(self, peer, transport, end):
        messages = some("a", "b", "silent", "bad", "last")

        def when_all_are_there(message):
            if message.headers["cloudEvents:bizid"] != "last":
                return []
            acks = [partial(peer.ack, earlier) for earlier in peer.published[:2]]
            return [*acks, partial(peer.nack, peer.published[3]), getattr(peer, end)]

        peer.script = when_all_are_there
        report = one_pass(transport)

        assert [state_of(message) for message in messages] == [
            State.PUBLISHED,
            State.PUBLISHED,
            State.READY,
            State.RETRYING,
            State.READY,
        ]
        assert [row_of(message).attempts for message in messages] == [1, 1, 0, 1, 0]
        assert report.broken
        assert report.settled == 3

    def test_unknown_outcome_at_the_deadline_counts_no_attempt(self, peer, transport):
        answered, silent = some("a", "silent")
        answering(peer, silent="nothing")

        report = sent_in_vain(peer, transport, count=2)

        assert (state_of(answered), state_of(silent)) == (State.PUBLISHED, State.READY)
        assert row_of(silent).attempts == 0
        assert report.broken is None
        assert report.aside == {Reason.AWAITED: 1}

    @pytest.mark.parametrize("is_silent", [False, True])
    def test_message_without_an_answer_ends_no_pass_in_which_others_are_answered(self, peer, transport, is_silent):
        """Only some queues of a topic may confirm nothing; and silent topics are not all of the same queue."""
        topics = ("shop.dead", TOPIC)
        if is_silent:
            peer.script = lambda message: []
            for topic in topics:
                published(topic)
            one_pass(transport)
        peer.script = lambda message: [partial(peer.ack, message)] if message.routing_key == TOPIC else []
        dead = published("shop.dead")
        others = [published(key="k") for _ in range(1 if is_silent else 3)]

        one_pass(transport)

        assert all_published(others)
        assert state_of(dead) == State.READY

    def test_message_with_an_unknown_outcome_is_sent_again_with_the_same_id(self, peer, transport):
        """When its connection is lost; before that, the broker may still confirm it. A late ack then confirms nothing."""
        some("silent")
        answering(peer, silent="nothing")
        sent_in_vain(peer, transport)
        assert one_pass(transport).claimed == 0
        peer.drop()
        peer.script = lambda message: [partial(peer.ack, peer.published[0]), partial(peer.nack, message)]
        connect_again(transport)

        one_pass(transport)

        first, second = peer.published
        assert ids([first]) == ids([second])
        assert (first.connection, second.connection) == (1, 2)
        assert states() == [State.RETRYING]

    @pytest.mark.parametrize("meanwhile", ["expired", "its topic is paused", "an earlier message of its key failed"])
    def test_message_that_is_confirmed_late_is_published_whatever_happened_meanwhile(
        self, peer, transport, signals_sent, meanwhile
    ):
        earlier = published(key="k", delay=timedelta(hours=1))
        late = published(key="k", expires_in=timedelta(hours=1))
        peer.hold()
        sent_in_vain(peer, transport)
        if meanwhile == "expired":
            set_columns(late, expires_at=DatabaseTime())
        elif meanwhile == "its topic is paused":
            pause(late.topic)
        else:
            set_columns(earlier, state=State.RETRYING)
        peer.ack(1)
        transport.idle()

        report = one_pass(transport)

        assert (report.published, state_of(late), row_of(late).attempts) == (1, State.PUBLISHED, 1)
        assert len(peer.published) == 1
        assert [name for name, *_ in signals_sent()] == ["published"]

    @pytest.mark.parametrize("answer", ["nack", "return"])
    def test_failure_that_is_reported_after_the_deadline_counts_and_holds_back_its_key(
        self, peer, transport, signals_sent, answer
    ):
        """Otherwise a message that always fails late would be sent forever."""
        late, behind = some("late", "behind", key="k")
        peer.hold()
        sent_in_vain(peer, transport)
        answering(peer)
        if answer == "return":
            peer.return_message(1)
        (peer.nack if answer == "nack" else peer.ack)(1)
        transport.idle()

        one_pass(transport)

        assert (state_of(late), row_of(late).attempts) == (State.RETRYING, 1)
        assert state_of(behind) == State.READY
        assert len(peer.published) == 1
        assert [(name, position) for name, position, _ in signals_sent()] == [("retrying", late.id)]

    def test_message_that_failed_after_the_deadline_and_has_expired_is_expired(self, peer, transport):
        [late] = some("late", expires_in=timedelta(hours=1))
        peer.hold()
        sent_in_vain(peer, transport)
        set_columns(late, expires_at=DatabaseTime())
        peer.nack(1)
        transport.idle()

        one_pass(transport)

        assert state_of(late) == State.EXPIRED


def connect_again(transport):
    """The first try may find that the old connection is lost."""
    with suppress(BrokerUnavailable):
        transport.connect()
    transport.connect()


class TestRefusedMessage:
    @pytest.mark.parametrize("poison", [{100}, {0, 7, 8, 255}])
    def test_messages_refused_within_a_large_batch_are_all_found_by_halving(self, peer, transport, poison):
        messages = published_many(256, biz_id=lambda n: "poison" if n in poison else str(n))
        OutboxMessage.objects.update(shard=7)  # a pass reads an equal share of each shard that has messages
        answering(peer, poison="refuse")

        report = one_pass(transport)

        refused = {row_of(messages[n]).state for n in poison}
        assert (refused, states().count(State.PUBLISHED)) == ({State.RETRYING}, 256 - len(poison))
        assert set(OutboxMessage.objects.values_list("attempts", flat=True)) == {1}
        assert (report.claimed, report.settled, report.published, report.broken) == (256, 256, 256 - len(poison), None)
        assert peer.connections <= 10 * len(poison), "2 to the power of 8 are 256"

    def test_search_for_a_refused_message_goes_on_after_an_outage_with_a_small_batch(self, peer, transport):
        some("a", "poison", "b")

        def script(message):
            if message.headers["cloudEvents:bizid"] == "poison":
                peer.refuse_connections = True
                return [partial(peer.close_channel, 406, "PRECONDITION_FAILED")]
            return []

        peer.script = script
        report = one_pass(transport)

        assert states() == [State.READY] * 3
        assert report.broken
        assert report.suspicious


@pytest.mark.every_database
class TestOrder:
    def test_messages_are_sent_by_priority_then_by_position(self, peer, transport):
        for biz_id, priority in [("n1", 0), ("h1", 9), ("n2", 0), ("m1", 5), ("h2", 9)]:
            published(biz_id=biz_id, priority=priority)

        one_pass(transport)

        assert [m.headers["cloudEvents:bizid"] for m in peer.published] == ["h1", "h2", "m1", "n1", "n2"]

    def test_next_message_of_a_key_is_sent_once_the_previous_was_confirmed(self, peer, transport):
        some("k1", "k2", "k3", key="k")
        some("free")
        confirmed = []

        def script(message):
            name = message.headers["cloudEvents:bizid"]
            if name.startswith("k"):
                assert len(confirmed) == int(name[1]) - 1, "one message of a key is under way at a time"
                confirmed.append(name)
            return [partial(peer.ack, message)]

        peer.script = script
        one_pass(transport)

        assert confirmed == ["k1", "k2", "k3"]
        assert set(states()) == {State.PUBLISHED}

    @pytest.mark.parametrize("answer", ["nack", "return", "refuse"])
    def test_failed_head_holds_back_its_own_key_only(self, peer, transport, answer):
        held = some("k1", "k2", "k3", key="k")
        others = some("o1", "o2", key="o") + some("free")
        answering(peer, k1=answer)

        one_pass(transport)

        assert [state_of(message) for message in held] == [State.RETRYING, State.READY, State.READY]
        assert {state_of(message) for message in others} == {State.PUBLISHED}
        assert one_pass(transport).published == 0, "and the next pass does not send them either"
        assert [state_of(message) for message in held] == [State.RETRYING, State.WAITING, State.WAITING]
        assert one_pass(transport).claimed == 0, "nor does any later one even read them"

    def test_head_with_an_unknown_outcome_stops_its_key_within_the_pass(self, peer, transport):
        held = some("k1", "k2", key="k")
        answering(peer, k1="nothing")

        sent_in_vain(peer, transport)

        assert [state_of(message) for message in held] == [State.READY, State.READY]
        assert [m.headers["cloudEvents:bizid"] for m in peer.published] == ["k1"]


def test_pass_claims_no_more_than_its_limit(transport):
    published_many(30, "t")

    claimed = [one_pass(transport, limit=10).claimed for _ in range(30)]

    assert claimed[0] == 10
    assert max(claimed) == 10
    assert sum(claimed) == 30


class TestWaves:
    """Messages of one key wait for each other, so a wave takes a round trip to the broker, however small it is."""

    def test_small_last_waves_of_a_full_batch_are_left_to_the_next_pass(self, peer, transport):
        keys = [f"k{n}" for n in range(38)] + ["k0", "k0"]
        messages = published_many(len(keys), key=lambda n: keys[n])
        OutboxMessage.objects.update(shard=7)

        first = one_pass(transport, limit=len(keys))
        assert (first.claimed, first.published, first.has_more) == (40, 38, True)
        second = one_pass(transport, limit=len(keys))

        assert (second.claimed, second.published, second.has_more) == (2, 2, False)
        assert ids(peer.published) == ids(messages), "in order"

    def test_no_more_messages_of_a_hot_key_are_read_than_a_pass_sends(self, peer, transport):
        published_many(400, key="hot")
        single = Pass("default", transport, quick(BATCH_SIZE=300))

        reports = []
        while (found := looking.look("default")).shards:
            reports.append(single.run(found.shards, 300))

        assert reports[0].claimed == 300
        assert max(report.claimed for report in reports[1:]) <= 100
        assert len(peer.published) == 400

"""A topic with a rate is published no faster than that by all relays together, in order, and delays no other topic."""

from datetime import timedelta
from functools import partial

import pytest

from exactly_once.process.clock import monotonic
from exactly_once.sql.now import DatabaseTime
from outbox import TopicState, pause, resume
from outbox.models import OutboxMessage, PausedTopic
from outbox.relay.passes import Pass
from outbox.states import State
from outbox.store import looking, paused_topics
from outbox.testing import run_relay
from tests.support.relaying import connected, drained, ids, published, published_many, quick, relaying, row_of, state_of, states
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

LIMITED, OTHER = "shop.mail.wanted", "shop.order.placed"
PER_SECOND = 50
BURST = 6
"""One message, and those of a tenth of a second."""
HOUR = timedelta(hours=1)


def at(rate):
    return {"TOPICS": {"shop.mail.*": {"RATE": rate}}}


@pytest.fixture
def instants(peer):
    """When the broker received each message of LIMITED."""
    instants = []
    peer.script = lambda m: [lambda: (instants.append(monotonic()) if m.routing_key == LIMITED else None, peer.ack(m))]
    return instants


many = partial(published_many, topic=LIMITED)


def count(state, topic=LIMITED):
    return OutboxMessage.objects.filter(topic=topic, state=state).count()


def limited(count, allowed_at):
    """Messages that the rate of their topic has paused."""
    many(count)
    OutboxMessage.objects.update(state=State.PAUSED)
    PausedTopic.objects.create(topic=LIMITED, paused_at=DatabaseTime(), mode=TopicState.LIMITED, allowed_at=allowed_at)


def the_row():
    return PausedTopic.objects.get(topic=LIMITED)


def assert_within_the_rate(instants, per_second, burst):
    """In no period, however short, came more messages than its rate and two bursts allow: one saved up, and one on its way."""
    for first, begin in enumerate(instants):
        for last in range(first, len(instants)):
            assert last - first + 1 <= per_second * (instants[last] - begin) + 2 * burst + 1


def test_messages_published_one_by_one_are_sent_no_faster_than_the_rate(peer, instants):
    """The row of the topic stays until the rate allows a burst again, so that each message does not begin a new bucket."""
    with relaying(peer.url, relays=2, **at("10/s")):
        for _ in range(8):
            message = published(LIMITED)
            wait_until(lambda message=message: state_of(message) == State.PUBLISHED)

    assert_within_the_rate(instants, 10, 2)


@pytest.mark.every_database
def test_first_message_of_a_low_rate_is_sent_at_once_and_the_second_waits(peer, instants):
    first, second = many(2)
    with relaying(peer.url, **at("5/h")):
        wait_until(lambda: state_of(first) == State.PUBLISHED)
        wait_until(lambda: state_of(second) == State.PAUSED)
        row = the_row()
        assert timedelta(minutes=11) < row.allowed_at - row.paused_at < timedelta(minutes=13)
    assert len(instants) == 1


@pytest.mark.long
def test_two_relays_together_send_no_more_than_the_rate_and_keep_the_order_of_a_key_also_beside_another_topic(peer, instants):
    many(60)
    sent = [message for _ in range(5) for topic in (LIMITED, OTHER) for message in many(4, topic=topic, key="k")]
    with relaying(peer.url, relays=2, **at(f"{PER_SECOND}/s")):
        wait_until(lambda: set(states()) == {State.PUBLISHED})
        wait_until(lambda: not PausedTopic.objects.exists())

    assert [one for one in ids(peer.published) if one in ids(sent)] == ids(sent)
    assert len(instants) == 80
    assert_within_the_rate(instants, PER_SECOND, BURST)


@pytest.mark.long
def test_large_backlog_of_a_limited_topic_delays_no_other_topic_and_is_read_once(peer, instants):
    many(3000)
    with relaying(peer.url, relays=2, **at("1/h")):
        others = many(20, topic=OTHER)
        wait_until(lambda: {state_of(message) for message in others} == {State.PUBLISHED})
        wait_until(lambda: count(State.PAUSED) == 2999)
        assert not looking.look("default").shards
        later = published(OTHER)
        wait_until(lambda: state_of(later) == State.PUBLISHED)

    assert len(instants) == 1


@pytest.mark.long
def test_everything_is_sent_once_the_rate_is_no_longer_in_the_settings(peer):
    messages = many(200, key="k")
    with relaying(peer.url, **at("1/h")):
        wait_until(lambda: count(State.PAUSED) == 199)
    with relaying(peer.url, relays=2):
        wait_until(lambda: set(states()) == {State.PUBLISHED})
        wait_until(lambda: not PausedTopic.objects.exists())

    assert ids(peer.published) == ids(messages)


@pytest.mark.long
def test_raised_rate_applies_at_once_although_the_next_message_was_due_in_an_hour(peer, instants):
    many(30)
    with relaying(peer.url, **at("1/h")):
        wait_until(lambda: count(State.PAUSED) == 29)
        limited_at = the_row().probe_at
        wait_until(lambda: the_row().probe_at != limited_at)  # by the rate of an hour
    with relaying(peer.url, **at("1000/s")):
        wait_until(lambda: count(State.PUBLISHED) == 30)


@pytest.mark.every_database
@pytest.mark.parametrize(("ago", "released"), [(HOUR, BURST), (-HOUR, 0)])
def test_rate_saves_up_no_more_than_a_burst_and_waits_no_longer_than_for_one_message(ago, released):
    """However long nothing was sent, and if the database's clock was set back by an hour."""
    limited(20, allowed_at=DatabaseTime(-ago))

    assert paused_topics.release_allowed("default", LIMITED, PER_SECOND) == released
    assert len(the_row().in_trial) == count(State.READY) == released
    allowed_in = the_row().allowed_at - OutboxMessage.objects.annotate(now=DatabaseTime()).first().now
    assert allowed_in <= timedelta(seconds=1 / PER_SECOND)
    PausedTopic.objects.update(allowed_at=DatabaseTime(-ago))
    paused_topics.release_allowed("default", LIMITED, PER_SECOND)
    assert len(the_row().in_trial) == count(State.READY) == released, "messages that are not sent yet count"


def test_message_that_is_allowed_after_a_pass_has_looked_is_not_paused_by_that_pass(peer):
    """Another relay allows it meanwhile. Its token would be lost, and at a low rate the topic would wait for the next."""
    first, *_ = many(5)
    with connected(peer.url) as transport:
        late = Pass("default", transport, quick(**at("1/h")))
        found = looking.look("default")
        late.topics.update(found.paused)
        paused_topics.limit("default", LIMITED, 1 / 3600, [row_of(first).pk])
        late.run(found.shards, 500)

    assert state_of(first) == State.READY
    assert count(State.PAUSED) == 4


def test_drain_ends_when_the_rate_allows_no_more(peer):
    many(20)
    relay = drained(peer.url, **at("1/h"))

    assert relay.published == 1
    assert count(State.PAUSED) == 19


def test_run_relay_of_the_tests_sends_everything(settings):
    settings.OUTBOX = {"BROKER_URL": "amqp://nowhere", **at("1/h")}
    many(20)

    assert len(run_relay()) == 20


@pytest.mark.every_database
class TestPausedAndLimited:
    def test_operator_pauses_a_limited_topic_and_it_is_limited_again_when_resumed(self, peer):
        many(20)
        with relaying(peer.url, **at("1/h")):
            wait_until(lambda: count(State.PAUSED) == 19)
            assert resume(LIMITED) is TopicState.LIMITED
            assert the_row().mode == TopicState.LIMITED
            assert pause(LIMITED, by="ada") is TopicState.LIMITED
            assert (the_row().mode, the_row().paused_by) == (TopicState.PAUSED, "ada")
            assert resume(LIMITED) is TopicState.PAUSED
            wait_until(lambda: the_row().mode == TopicState.LIMITED)
            wait_until(lambda: count(State.PUBLISHED) == 2)

        assert count(State.PAUSED) == 18

    def test_limited_topic_that_the_broker_refuses_is_paused_and_then_limited_again(self, peer, short_pauses):
        room = []
        peer.script = lambda m: [lambda: (peer.ack if room else peer.nack)(m)]
        many(60)
        with relaying(peer.url, relays=2, MAX_ATTEMPTS=1000, **at("1000/s")):
            wait_until(PausedTopic.objects.filter(topic=LIMITED, mode=TopicState.REFUSED, in_trial=[]).exists)
            room.append(True)
            wait_until(lambda: set(states()) == {State.PUBLISHED})
            wait_until(lambda: not PausedTopic.objects.exists())

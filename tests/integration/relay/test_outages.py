"""The broker or the database is unavailable: the relay waits, logs it once, counts no attempt, and then continues."""

import logging
from collections import Counter
from datetime import timedelta
from functools import partial

import pytest

from exactly_once.process.clock import monotonic
from exactly_once.process.loop import StopRequest
from outbox.models import PausedTopic
from outbox.states import State
from tests.support.aliases import unresolvable
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.relaying import (
    TOPIC,
    Queue,
    drained,
    ids,
    in_threads,
    published,
    published_many,
    relaying,
    row_of,
    state_of,
    states,
    waiting,
)
from tests.support.servers.private import free_port
from tests.support.sql import executed
from tests.support.waiting import wait_until, wait_until_reached

pytestmark = pytest.mark.django_db(transaction=True)

AWAY = "The broker is unavailable"
BACK = "The broker is available again"


@pytest.fixture(autouse=True)
def warnings_captured(caplog):
    caplog.set_level(logging.WARNING)


def said(caplog, text):
    return sum(text in record.getMessage() for record in caplog.records)


def untouched(*messages):
    """Ready as when they were published: an outage counts no attempt."""
    return all((row_of(m).state, row_of(m).attempts, row_of(m).last_error) == (State.READY, 0, "") for m in messages)


@pytest.mark.long
class TestBrokerOutage:
    def test_relay_without_a_broker_at_its_start_ends_when_asked_to_stop_and_the_next_waits_for_the_broker(
        self, rabbitmq_url, proxy, caplog
    ):
        proxy.refuse()
        message = published()

        with Queue(rabbitmq_url) as queue:
            with relaying(f"amqp://guest:guest@127.0.0.1:{free_port()}//"):
                wait_until(lambda: said(caplog, AWAY))
            with relaying(proxy.through(rabbitmq_url)):
                wait_until(lambda: said(caplog, AWAY) == 2)
                assert untouched(message)
                proxy.accept()
                wait_until(lambda: not waiting())
                wait_until(lambda: said(caplog, BACK))

            assert ids(queue.take(1)) == [str(message.id)]
        assert row_of(message).attempts == 1
        assert (said(caplog, AWAY), said(caplog, BACK)) == (2, 1)

    def test_broker_that_becomes_unavailable_is_waited_for(self, rabbitmq_url, proxy, caplog):
        with Queue(rabbitmq_url) as queue, relaying(proxy.through(rabbitmq_url)):
            before = published()
            wait_until(lambda: state_of(before) == State.PUBLISHED)
            proxy.refuse()
            proxy.cut()
            during = published()
            wait_until(lambda: said(caplog, f"{AWAY} ('amqp://***@127.0.0.1:{proxy.port}/"))
            assert untouched(during)
            proxy.accept()
            wait_until(lambda: not waiting())

            assert set(ids(queue.take(2))) >= set(ids([before, during]))
        assert (said(caplog, AWAY), said(caplog, BACK)) == (1, 1)

    def test_frozen_connection_is_an_outage_at_the_batch_deadline(self, rabbitmq_url, proxy, caplog):
        with Queue(rabbitmq_url) as queue, relaying(proxy.through(rabbitmq_url), BATCH_DEADLINE=timedelta(milliseconds=300)):
            first = published()
            wait_until(lambda: state_of(first) == State.PUBLISHED)
            proxy.freeze()
            second = published()
            wait_until(lambda: said(caplog, AWAY))
            assert untouched(second)
            proxy.thaw()
            wait_until(lambda: not waiting())

            # A stall longer than the deadline has the first one sent twice.
            arrived = []
            wait_until(lambda: arrived.extend(queue.take_all()) or set(ids(arrived)) == set(ids([first, second])))

    def test_dropped_idle_connection_is_replaced_without_an_outage(self, peer, caplog):
        with relaying(peer.url):
            first = published()
            wait_until(lambda: state_of(first) == State.PUBLISHED)
            peer.drop()
            wait_until(lambda: peer.connections == 2)
            second = published()
            wait_until(lambda: state_of(second) == State.PUBLISHED)

        assert ids(peer.published) == ids([first, second]), "nothing was sent into the dead connection"
        assert said(caplog, AWAY) == 0


@pytest.mark.parametrize(
    ("server", "url"),
    [pytest.param("mortal_rabbitmq", "rabbitmq_url", marks=pytest.mark.long), ("redis_server", "redis_url")],
)
def test_broker_restarted_after_a_kill_has_every_accepted_message(server, url, request, caplog):
    server, url = map(request.getfixturevalue, (server, url))
    with Queue(url):
        pass
    with relaying(url):
        before = published()
        wait_until(lambda: state_of(before) == State.PUBLISHED)
        server.kill()
        during = published()
        wait_until(lambda: said(caplog, AWAY))
        assert untouched(during)
        server.start()
        wait_until(lambda: not waiting(), within=60)

    with Queue(url) as queue:
        assert set(ids(queue.take(2))) == set(ids([before, during]))


@pytest.mark.long
class TestLateConfirms:
    """The broker confirms each message, always later than BATCH_DEADLINE."""

    DEADLINE = timedelta(seconds=0.5)

    @pytest.fixture
    def late(self):
        with FakeAmqpPeer() as peer, in_threads(partial(self.answer, peer, stop := StopRequest()), stop=stop):
            peer.hold()
            yield peer

    def answer(self, peer, stop):
        """Confirm each message two deadlines after it was received."""
        received = {}
        while not stop:
            for message in list(peer.published):
                since = received.setdefault((message.connection, message.tag), monotonic())
                if since is not None and monotonic() > since + 2 * self.DEADLINE.total_seconds():
                    received[message.connection, message.tag] = None
                    peer.ack(message)
            stop.wait(0.02)

    def test_messages_confirmed_after_the_deadline_are_published_and_sent_once_and_in_the_order_of_their_key(self, late):
        messages = published_many(200, key=lambda n: f"k{n % 100}" if n % 2 else "") + published_many(4, key="k")
        with relaying(late.url, BATCH_DEADLINE=self.DEADLINE):
            wait_until(lambda: set(states()) == {State.PUBLISHED})

        assert Counter(ids(late.published)) == Counter(ids(messages))
        assert [one for one in ids(late.published) if one in ids(messages[-4:])] == ids(messages[-4:])
        assert late.connections == 1

    def test_unconfirmed_messages_delay_no_others(self):
        """As while a queue of the broker has lost its majority."""
        with FakeAmqpPeer() as peer:
            peer.script = lambda message: [partial(peer.ack, message)] if message.routing_key == TOPIC else []
            published_many(40, "shop.stuck")
            with relaying(peer.url, BATCH_DEADLINE=self.DEADLINE, BATCH_SIZE=20) as [relay]:
                wait_until(lambda: len(peer.published) > 20)
                published_many(12)
                wait_until_reached(12, lambda: relay.published)
                stuck = [message for message in peer.published if message.routing_key != TOPIC]
                assert len(stuck) == len(set(ids(stuck)))

    def test_topic_of_which_many_messages_are_not_confirmed_is_paused_although_others_are(self):
        with FakeAmqpPeer() as peer:
            peer.script = lambda message: [partial(peer.ack, message)] if message.headers["cloudEvents:bizid"] == "good" else []
            published_many(400, biz_id=lambda n: "good" if n % 2 else "dead")
            with relaying(peer.url, BATCH_SIZE=20):
                wait_until(PausedTopic.objects.exists)

            assert states().count(State.PUBLISHED) < 200

    def test_broker_that_confirms_nothing_gets_a_batch_and_single_probes(self, late, monkeypatch):
        monkeypatch.setattr(late, "ack", lambda message: True)
        published_many(40)
        with relaying(late.url, BATCH_SIZE=8):
            wait_until(lambda: states().count(State.PAUSED) > 20)
            sent = ids(late.published)

        assert 8 < len(sent) <= 8 + 5
        assert len(set(sent)) == len(sent)


class TestDatabaseOutage:
    @pytest.mark.long
    def test_relay_waits_while_the_name_of_its_database_does_not_resolve(self, peer, caplog):
        with relaying(peer.url, timed=True):
            first = published()
            wait_until(lambda: state_of(first) == State.PUBLISHED)
            with unresolvable():
                assert end_other_sessions() >= 1, "that of the relay"
                second = published()
                wait_until(lambda: said(caplog, "failed to resolve host"))
                assert untouched(second)
            wait_until(lambda: state_of(second) == State.PUBLISHED)

        assert [record for record in caplog.records if record.exc_info] == []


def end_other_sessions():
    """End every other session on this database, as an operator or a failover does; return their number."""
    return executed(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    ).count((True,))


@pytest.mark.every_database
class TestDraining:
    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_drain_publishes_the_messages_of_its_database_only(self, peer):
        here, there = published(), published(using="other")

        drained(peer.url, alias="other")

        assert ids(peer.published) == [str(there.id)]
        assert (state_of(here), state_of(there, "other")) == (State.READY, State.PUBLISHED)

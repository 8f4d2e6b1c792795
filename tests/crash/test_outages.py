"""The broker, the database or a connection fails under load: no attempt is counted, and no process has to be restarted."""

import os
import signal

import pytest
from django.core.management import call_command
from django.db import connection

from exactly_once.process.clock import utcnow
from inbox import Retry
from inbox.models import InboxMessage
from inbox.states import Outcome, State
from inbox.store.dialect import is_reachable
from inbox.transactions.running import DatabaseUnavailable
from outbox.models import OutboxMessage
from tests.support.deliveries import an_envelope, deliver, run_to_the_end, the_effect, the_row
from tests.support.servers import FaultProxy
from tests.support.waiting import wait_until

DEADLINE = {"BATCH_DEADLINE": 1}
SOME = 40


def test_a_broker_killed_under_load_costs_no_message_and_no_attempt(mortal_rabbitmq, world):
    workers = [world.listening(), world.relay()]
    with world.load() as tally:
        world.flows()
        world.let_the_broker_remember_its_queues()
        mortal_rabbitmq.kill()
        world.wait_until(
            lambda: workers[0].has_said("is unavailable") and workers[1].has_said("is unavailable"), "both noticed"
        )
        committed = tally.total()
        world.wait_until(lambda: tally.total() > committed + SOME, "producers go on without a broker")
        waiting = OutboxMessage.objects.filter(state="ready")
        assert waiting.exists()
        assert not waiting.filter(attempts__gt=0).exists(), "an outage was counted as an attempt"
        mortal_rabbitmq.start()
        world.flows()
    assert all(worker.is_alive for worker in workers), world.tails()
    found = world.drain()

    world.assert_nothing_went_wrong(found)
    assert world.most_attempts() == 1
    assert not OutboxMessage.objects.exclude(last_error="").exists()


def test_a_database_killed_under_load_costs_no_message_and_no_attempt(mortal_world, mortal_postgres):
    world = mortal_world
    workers = [world.listening(), world.relay()]
    with world.load(producers=3) as tally:
        for _ in range(2):
            world.flows()
            mortal_postgres.kill()
            connection.close()
            mortal_postgres.start()
    assert all(worker.is_alive for worker in workers), world.tails()
    found = world.drain()

    assert tally["unknown"] > 0, "no producer ever noticed"
    assert all(worker.has_said("is unavailable") or worker.has_said("is available again") for worker in workers), world.tails()
    world.assert_nothing_went_wrong(found)
    assert world.most_attempts() == 1
    # A delivery whose commit was made and not answered is a duplicate of its own row.
    assert world.redelivered() <= world.suppressed()


def test_a_relay_whose_connection_is_cut_in_the_middle_of_batches_loses_nothing(world):
    """Cut after some bytes, so also in the middle of a frame, again and again."""
    world.listening()
    with FaultProxy("127.0.0.1", world.rabbit.port) as proxy:
        relay = world.relay(broker_url=proxy.through(world.broker_url), outbox=DEADLINE)
        for nbytes in (1, 700, 3_001, 9_999, 20_011, 33_333):
            world.wait_until(lambda: proxy.connections, "the relay is connected")
            proxy.cut_after(nbytes)
            world.wait_until(lambda: world.operate(20) or not proxy._cut_after, "the connection was cut")
        world.wait_until(world.is_quiet, "everything got through in spite of it")
        while not world.redelivered():  # no cut came after the broker had a message
            proxy.cut_after(5_000)
            world.wait_until(lambda: world.operate(20) or not proxy._cut_after, "the connection was cut")
            world.wait_until(world.is_quiet, "everything got through in spite of it")

        assert relay.is_alive, relay.tail()
        found = world.drain()

    assert relay.has_said("The broker is unavailable")
    assert world.redelivered() > 0
    assert world.suppressed() == world.redelivered()
    world.assert_nothing_went_wrong(found)
    assert world.most_attempts() == 1


def test_messages_whose_confirms_never_arrive_are_sent_again_and_suppressed_by_the_inbox(world):
    """The broker accepts every message and its confirms are dropped: messages with an unknown outcome are sent again."""
    world.listening()
    with FaultProxy("127.0.0.1", world.rabbit.port) as proxy:
        relay = world.relay(broker_url=proxy.through(world.broker_url), outbox=DEADLINE)
        world.operate(1)
        world.wait_until(world.is_quiet, "the connection is in use")
        proxy.drop_server_to_client()
        world.operate(SOME)
        world.wait_until(lambda: relay.has_said("The broker is unavailable"), "the relay gave up waiting for confirms")
        arrived = world.wait_until(lambda: world.inbox()["done"] - 1, "the broker had some of them")
        assert world.published() == 1, "a message was settled without a confirm"
        proxy.cut()
        world.wait_until(world.is_quiet, "everything was confirmed in the end")
        assert relay.is_alive, relay.tail()
        found = world.drain()

    assert world.redelivered() >= arrived
    assert world.suppressed() == world.redelivered()
    world.assert_nothing_went_wrong(found)
    assert world.most_attempts() == 1


def test_effects_are_not_repeated_when_the_consumer_loses_its_connection_before_the_ack(world):
    """Messages whose effect is committed and whose ack was lost are delivered again, and have no second effect."""
    world.relay()
    with FaultProxy("127.0.0.1", world.rabbit.port) as proxy:
        consumer = world.listening(broker_url=proxy.through(world.broker_url))
        cuts = 0
        while cuts < 5 or not world.suppressed():  # no acknowledgement was on its way
            before = world.inbox()["done"]
            world.operate(60)
            world.wait_until(lambda before=before: world.inbox()["done"] > before, "it is in the middle of them")
            proxy.cut()
            cuts += 1
            world.wait_until(lambda: proxy.connections, "it came back")
        world.wait_until(world.is_quiet, "everything got through in spite of it")
        assert consumer.is_alive, consumer.tail()
        found = world.drain()

    assert world.redelivered() > 0
    assert world.suppressed() > 0
    world.assert_nothing_went_wrong(found)


def test_a_broker_that_lost_its_disk_under_load_is_repaired_by_a_replay_and_every_message_is_handled_once(
    mortal_rabbitmq, world
):
    began_at = utcnow()
    consumer, relay = world.listening(), world.relay()
    with world.load():
        world.flows()
        consumer.kill()
        published = world.published()
        world.wait_until(lambda: world.in_broker() > SOME, "confirmed messages wait in the broker")
        mortal_rabbitmq.lose_the_disk()
        mortal_rabbitmq.create_vhost(world.broker_url.rpartition("/")[2])
        assert world.in_broker() == 0

        world.listening()
        replay = world.command("outbox_replay", "--since", began_at.isoformat(), "--yes", "--rate", "2000/s")
        assert replay.ends() == 0, replay.tail()
        assert not replay.has_said("Not sent"), replay.tail()
        assert relay.is_alive
        world.flows()
    found = world.drain()

    assert published < world.published()
    world.assert_nothing_went_wrong(found)
    assert InboxMessage.objects.filter(replays__gt=0).exists(), "nothing that had been handled was replayed"


def test_message_that_ends_its_database_server_at_each_call_runs_out_of_attempts(handles, mortal_database):
    call_command("migrate", verbosity=0)
    calls = []

    def ends_the_server(message):
        calls.append(message.attempt)
        os.kill(connection.connection.info.backend_pid, signal.SIGKILL)
        the_effect(message)

    handler, envelope = handles(ends_the_server, retry=Retry(max_attempts=2)), an_envelope()
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable):
            deliver(handler, envelope)
        wait_until(lambda: is_reachable("default"))
    run_to_the_end()

    # A new message, excused; counted before it is called, and excused; then each call counts, and the last one is repeated.
    assert (calls, the_row().state) == ([1, 1, 1, 2, 3], State.DEAD)
    assert deliver(handler, envelope) is Outcome.DUPLICATE

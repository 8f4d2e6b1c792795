"""A process sleeps longer than anybody waits for it, and wakes believing that nothing has happened."""

from __future__ import annotations

import pytest

from outbox.models import OutboxMessage
from tests.support.servers import FaultProxy

SEND = "outbox.transports.amqp.AmqpTransport.send"
SETTLE = "outbox.store.settle"
LEASE_SETTLE = "outbox.store.Lease.settle"
FINISH = "inbox.store.finish"
DEADLINE = {"BATCH_DEADLINE": 2, "WATCHDOG": 300}
OPERATIONS = 20


@pytest.mark.every_database
def test_a_relay_that_overslept_settles_nothing(world, engine):
    """It stops between the confirms and the settlement; another takes over; what the first wakes up with is stale."""
    point = {"postgres": SETTLE, "sqlite": LEASE_SETTLE}[engine]
    consumer = world.listening()
    sleeper = world.relay(failpoint=f"stop before {point} 1 once {SEND}", outbox=DEADLINE)
    world.operate(OPERATIONS, prefix="asleep-")
    world.wait_until(lambda: sleeper.is_stopped, "the relay fell asleep with a batch in hand")
    world.wait_until(world.deliveries, "what it has in hand has arrived")

    successor = world.relay(outbox=DEADLINE)
    world.wait_until(world.is_quiet, "another relay took over")
    settled = settlements()
    sleeper.wake()
    # Proof that it is awake and at work again, not that it died quietly.
    world.end(successor)
    world.operate(OPERATIONS, prefix="awake-")
    world.wait_until(world.is_quiet, "the relay that overslept did its part")

    assert settled.items() <= settlements().items(), "it settled what was not its own any more"
    assert world.most_attempts() == 1
    assert sleeper.is_alive, sleeper.tail()
    assert consumer.is_alive
    found = world.drain()

    assert world.redelivered() > 0, "what the sleeper had sent was not sent again: it was never in its hands"
    assert world.suppressed() == world.redelivered()
    world.assert_nothing_went_wrong(found)


def test_a_consumer_that_overslept_commits_once_and_acknowledges_nothing(world):
    """It stops with the effect in an open transaction; the broker gives the message to another, which must not wait for it."""
    relay = world.relay()
    with FaultProxy("127.0.0.1", world.rabbit.port) as proxy:
        sleeper = world.listening(failpoint=f"stop before {FINISH}", broker_url=proxy.through(world.broker_url))
        world.operate(1, prefix="asleep-")
        world.wait_until(lambda: sleeper.is_stopped, "the consumer fell asleep in its transaction")
        world.listening()
        proxy.cut()
        world.operate(OPERATIONS, prefix="meanwhile-")

        world.wait_until(
            lambda: world.inbox()["done"] >= OPERATIONS, "the other consumer went on without waiting for the sleeper"
        )
        sleeper.wake()
        world.wait_until(world.is_quiet, "the sleeper's message was settled, too")

        assert sleeper.is_alive, sleeper.tail()
        assert world.redelivered() > 0, "the broker never gave the message to another"
        assert relay.is_alive
        world.assert_nothing_went_wrong(world.drain())


def settlements():
    return dict(OutboxMessage.objects.filter(state="published").values_list("id", "settled_at"))

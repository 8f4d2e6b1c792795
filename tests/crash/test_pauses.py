"""A process is frozen for longer than any deadline, and then continues."""

from __future__ import annotations

import pytest

from outbox.models import OutboxMessage
from tests.support.crash.points import FENCED, FINISH, SEND, SETTLE
from tests.support.servers import FaultProxy

DEADLINE = {"BATCH_DEADLINE": 2, "WATCHDOG": 300}
OPERATIONS = 20


@pytest.mark.every_database
def test_a_frozen_relay_settles_nothing_after_another_relay_took_over(world, engine):
    """It is frozen between the confirms and the settlement, and another relay takes over. Its own settlement is then stale."""
    point = {"postgres": SETTLE, "sqlite": FENCED}[engine]
    consumer = world.listening()
    frozen = world.relay(failpoint=f"stop before {point} 1 once {SEND}", outbox=DEADLINE)
    world.operate(OPERATIONS, prefix="asleep-")
    world.wait_until(lambda: frozen.is_stopped, "the relay is frozen with a batch in hand")
    world.wait_until(world.deliveries, "what it has in hand has arrived")

    successor = world.relay(outbox=DEADLINE)
    world.wait_until(world.is_quiet, "another relay took over")
    settled = settlements()
    frozen.wake()
    # Proof that it is running again, and did not end unnoticed.
    world.end(successor)
    world.operate(OPERATIONS, prefix="awake-")
    world.wait_until(world.is_quiet, "the relay that was frozen publishes again")

    assert settled.items() <= settlements().items(), "it settled what another relay had taken over"
    assert world.most_attempts() == 1
    assert frozen.is_alive, frozen.tail()
    assert consumer.is_alive
    found = world.drain()

    assert world.redelivered() > 0, "nothing was sent again, so the frozen relay had no batch in hand"
    assert world.suppressed() == world.redelivered()
    world.assert_nothing_went_wrong(found)


def test_a_frozen_consumer_blocks_no_other_consumer_and_its_effect_happens_once(world):
    """It is frozen with the effect in an open transaction. Another consumer gets the message and must not wait."""
    relay = world.relay()
    with FaultProxy("127.0.0.1", world.rabbit.port) as proxy:
        frozen = world.listening(failpoint=f"stop before {FINISH}", broker_url=proxy.through(world.broker_url))
        world.operate(1, prefix="asleep-")
        world.wait_until(lambda: frozen.is_stopped, "the consumer is frozen in its transaction")
        world.listening()
        proxy.cut()
        world.operate(OPERATIONS, prefix="meanwhile-")

        world.wait_until(
            lambda: world.inbox()["done"] >= OPERATIONS, "the other consumer went on without waiting for the frozen one"
        )
        frozen.wake()
        world.wait_until(world.is_quiet, "the message of the frozen consumer was settled, too")

        assert frozen.is_alive, frozen.tail()
        assert world.redelivered() > 0, "the broker never gave the message to another"
        assert relay.is_alive
        world.assert_nothing_went_wrong(world.drain())


def settlements():
    return dict(OutboxMessage.objects.filter(state="published").values_list("id", "settled_at"))

"""A process is frozen for longer than any deadline, and then continues."""

import pytest
from django.db import transaction

from inbox.models import InboxMessage
from outbox import publish
from outbox.models import OutboxMessage
from tests.support.admin_pages import act, staff_client
from tests.support.apps.effects.models import Effect, Unique
from tests.support.apps.leased import LEASED_JOB
from tests.support.crash.points import FINISH, SEND, SETTLE
from tests.support.servers import FaultProxy

DEADLINE = {"BATCH_DEADLINE": 2, "WATCHDOG": 300}
OPERATIONS = 20


def test_a_frozen_relay_settles_nothing_after_another_relay_took_over(world):
    """It is frozen between the confirms and the settlement, and another relay takes over. Its own settlement is then stale."""
    consumer = world.listening()
    frozen = world.relay(failpoint=f"stop before {SETTLE} 1 once {SEND}", outbox=DEADLINE)
    world.operate(OPERATIONS, prefix="asleep-")
    world.wait_until(lambda: frozen.is_stopped, "the relay is frozen with a batch in hand")
    world.wait_until(world.deliveries, "what it has in hand has arrived")

    successor = world.relay(outbox=DEADLINE)
    world.wait_until(world.is_quiet, "another relay took over")
    settled = settlements()
    frozen.thaw()
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
        frozen.thaw()
        world.wait_until(world.is_quiet, "the message of the frozen consumer was settled, too")

        assert frozen.is_alive, frozen.tail()
        assert world.redelivered() > 0, "the broker never gave the message to another"
        assert relay.is_alive
        world.assert_nothing_went_wrong(world.drain())


@pytest.mark.parametrize(
    "store",
    [
        pytest.param("leases.stores.DatabaseLeases", marks=pytest.mark.every_database),
        "contrib.redis_leases.redis_store.RedisLeases",
    ],
)
def test_a_process_frozen_between_claim_and_lease_begins_no_run_after_an_operators_retry(local_world, redis_url, store):
    """Another process has claimed the retried message, whose attempts count from 1 again, and is running it."""
    world = local_world
    world.environment["DJANGO_SETTINGS_MODULE"] = "tests.support.apps.leased.crash_settings"
    world.inbox_options = {"LEASE_STORE": redis_url if "Redis" in store else "database"}
    with transaction.atomic():
        publish(LEASED_JOB, {"do": "wait for the word each time"}, biz_id="job")
    frozen = world.relay(failpoint=f"stop before inbox.{store}.acquire")
    world.wait_until(lambda: frozen.is_stopped, "a process is frozen with a message that it has claimed")

    operator = staff_client("view_inboxmessage", "retry_inboxmessage")
    act(operator, "retry", InboxMessage.objects.get(), page="admin:inbox_inboxmessage_changelist", confirmed="yes")
    world.relay()
    world.wait_until(begun, "another process runs it")
    frozen.thaw()
    world.end(frozen)

    assert begun() == 1
    Unique.objects.create(name="go job")
    world.wait_until(world.is_quiet, "the message is handled")
    assert (begun(), Effect.objects.filter(name="job").count(), world.inbox()) == (1, 1, {"done": 1})


def begun():
    return Effect.objects.filter(name="begun job").count()


def settlements():
    return dict(OutboxMessage.objects.filter(state="published").values_list("id", "settled_at"))

"""The broker's disk is lost: its queues are empty, and what it had confirmed is sent again from the outbox's history."""

from exactly_once.process.clock import utcnow
from inbox.models import InboxMessage

SOME = 60


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

"""Outgoing webhooks while processes are killed: each message arrives at each endpoint, under one id, and at most twice."""

import random
import time
from collections import Counter
from datetime import timedelta

import pytest
from django.db import transaction

from inbox.contrib.outgoing_webhooks import Endpoint
from inbox.models import InboxMessage
from inbox.testing import travel
from outbox import publish
from outbox.contrib.incoming_webhooks import StandardWebhooks
from tests.support.apps.hooked import TOPIC
from tests.support.crash.points import COMMIT
from tests.support.fakes.receiver import Receiver, Reply

SETTINGS = "tests.support.apps.hooked.settings"
COMMAND = "inbox_outgoing_webhooks"
INSERT = "inbox.contrib.outgoing_webhooks.fanning_out.insert"
POST = "inbox.contrib.outgoing_webhooks.delivering.post"
CONSUME = "inbox.leases.stores.DatabaseLeases.consume"
SENDING = {
    "before the request": (f"before {POST}", 1),
    "between the answer and the commit": (f"before {CONSUME} once {POST}", 2),
    "after the commit": (f"after {CONSUME} once {POST}", 1),
}
"""Where the process is killed, and how often the request arrives then."""
FANNING_OUT = [f"after {INSERT}", f"before {COMMIT} once {INSERT}", f"after {COMMIT} once {INSERT}"]

MESSAGES = 300
KILLS = 12


@pytest.fixture
def receiver():
    with Receiver() as receiver:
        yield receiver


def order(number=1):
    with transaction.atomic():
        return str(publish(TOPIC, {"order": number}, biz_id=f"order-{number}").id)


def handled(name):
    return InboxMessage.objects.filter(handler=f"webhook/{name}", state="done").count()


def handed_over():
    return InboxMessage.objects.filter(handler=f"webhooks/{TOPIC}", state="done").count()


@pytest.mark.every_database
@pytest.mark.parametrize("name", SENDING)
def test_a_process_killed_while_it_sends_is_followed_by_another_that_sends_the_same_id(local_world, receiver, name):
    point, times = SENDING[name]
    endpoint = Endpoint.objects.create(name="partner", url=receiver.url)
    message = order()
    relay = local_world.relay()
    local_world.wait_until(lambda: handed_over() == 1 and relay.is_ready, "the message is handed over")
    local_world.end(relay)
    local_world.dies_at(point, lambda **how: local_world.command(COMMAND, **how))
    travel(timedelta(minutes=1, seconds=1))  # the lease of the dead process
    survivor = local_world.command(COMMAND)
    local_world.wait_until(lambda: handled("partner") == 1, "the message is sent")
    local_world.end(survivor)

    assert receiver.ids == [message] * times
    assert len({request.body for request in receiver.requests}) == 1
    assert all(StandardWebhooks(endpoint.secret)(request.body, request.headers) for request in receiver.requests)


@pytest.mark.every_database
def test_a_process_killed_while_it_fans_out_stores_a_row_for_each_endpoint_or_for_none(local_world, receiver):
    for name in ("first", "second"):
        Endpoint.objects.create(name=name, url=f"{receiver.url}/{name}")
    for number, point in enumerate(FANNING_OUT):
        order(number)
        local_world.dies_at(point, local_world.relay)
        stored = [InboxMessage.objects.filter(handler=f"webhook/{name}").count() for name in ("first", "second")]
        assert stored[0] == stored[1]
    local_world.relay()
    local_world.command(COMMAND)
    local_world.wait_until(lambda: handled("first") == handled("second") == len(FANNING_OUT), "all messages are sent")

    assert Counter(receiver.paths) == {"/hooks/first": len(FANNING_OUT), "/hooks/second": len(FANNING_OUT)}


def test_every_message_arrives_while_the_sending_processes_are_killed(local_world, receiver):
    """Two processes, two endpoints of which one fails now and then; a kill four times a second."""
    chance = random.Random(local_world.seed)
    ids = {order(number) for number in range(MESSAGES)}

    def answer(request):
        time.sleep(0.01)
        return Reply(500 if request.path.endswith("flaky") and chance.random() < 0.1 else 200)

    receiver.answer = answer
    for name in ("steady", "flaky"):
        Endpoint.objects.create(name=name, url=f"{receiver.url}/{name}", concurrency=4)
    local_world.relay()
    workers = [local_world.command(COMMAND) for _ in range(2)]
    for _ in range(KILLS):
        time.sleep(0.25)
        place = chance.randrange(len(workers))
        local_world.wait_until(lambda place=place: workers[place].is_ready, "the process runs")
        workers[place].kill()
        workers[place] = local_world.again(workers[place])

    while (before := handled("steady") + handled("flaky")) < 2 * MESSAGES:
        travel(timedelta(seconds=61))  # leases of dead processes, retries, pauses
        local_world.wait_until(lambda before=before: handled("steady") + handled("flaky") > before, "messages are sent")
        time.sleep(1)

    for name in ("steady", "flaky"):
        arrived = Counter(request.id for request in receiver.requests if request.path == f"/hooks/{name}")
        assert set(arrived) == ids
    assert set(InboxMessage.objects.values_list("state", flat=True)) == {"done"}

"""A web server is killed while it answers clients of the HTTP API or stores an event: they repeat it, and nothing is lost."""

import base64
import hashlib
import hmac
import http.client
import json
from contextlib import closing

import pytest
from django.db import transaction

from exactly_once.process.clock import utcnow
from exactly_once.sql.now import DatabaseTime
from inbox.models import InboxMessage
from outbox import publish
from outbox.models import OutboxMessage
from tests.support.apps.effects.models import Effect
from tests.support.apps.subscribed import NAME, TOPIC
from tests.support.crash.urls import SECRET
from tests.support.http_api import SHOP
from tests.support.servers.private import LOOPBACK

pytestmark = pytest.mark.every_database

PUBLISHING = {
    "before outbox.contrib.http.publishing.publish_many": 0,
    "after outbox.contrib.http.publishing.publish_many": 0,
    "after exactly_once.contrib.views.answering.Idempotency.answer": 1,
}
"""Where the server is killed while it publishes, and how many messages are committed then."""
READING = {
    "after inbox.contrib.http.queries._claim_due": 1,
    "before inbox.store.lease_rows.lease_stored": 1,
    "after inbox.contrib.http.queries.claim": 1,
}
"""Where it is killed while a client reads, and how many attempts are counted then."""
ACKNOWLEDGING = {"before inbox.store.lease_rows.consume": "running", "after inbox.store.lease_rows.consume": "done"}
"""Where it is killed while a client acknowledges, and the state of the message then."""


@pytest.fixture
def serving(local_world):
    """Start the web server, to be killed at a failpoint; returns the process and a function that calls it."""
    local_world.environment["DJANGO_SETTINGS_MODULE"] = "tests.support.apps.subscribed.settings"

    def start(failpoint=""):
        server, port = local_world.web_server(failpoint and f"kill {failpoint}")
        return server, lambda where, body, **headers: call(port, where, body, headers)

    return start


def call(port, where, body, headers):
    """The status and the JSON of the answer of an API."""
    headers = {"Authorization": f"Bearer {SHOP}", "Content-Type": "application/json", **headers}
    status, answer = post(port, f"/api/{where}", json.dumps(body), headers)
    return status, json.loads(answer)


def post(port, path, body, headers):
    with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=60)) as client:
        client.request("POST", path, body, headers)
        answer = client.getresponse()
        return answer.status, answer.read()


def killed(local_world, serving, point, where, body, **headers):
    server, ask = serving(point)
    with pytest.raises(OSError):  # noqa: PT011 - the connection ends without an answer
        ask(where, body, **headers)
    local_world.dead(server, point)


def a_stored_message(local_world):
    """A message that a client may read."""
    with transaction.atomic():
        publish(TOPIC, {"job": 1})
    relay = local_world.relay()
    local_world.wait_until(InboxMessage.objects.exists, "the message is stored")
    relay.kill()


def test_message_is_published_once_although_the_server_is_killed_before_and_after_the_commit(local_world, serving):
    message, key = {"topic": TOPIC, "payload": {"job": 1}}, {"Idempotency-Key": "job-1"}
    for point, stored in PUBLISHING.items():
        killed(local_world, serving, point, "outbox/messages", message, **key)
        assert OutboxMessage.objects.count() == stored, point

    _, ask = serving()
    assert ask("outbox/messages", message, **key)[0] == 201
    assert OutboxMessage.objects.count() == 1


def test_message_is_read_again_although_the_server_is_killed_between_its_claim_and_the_answer(local_world, serving):
    a_stored_message(local_world)
    how = {"lease": 1}
    for number, (point, attempts) in enumerate(READING.items()):
        local_world.wait_until(is_due, "the message is due again")
        killed(local_world, serving, point, f"inbox/subscriptions/{NAME}/read", how)
        assert InboxMessage.objects.get().attempts == attempts + number, point

    _, ask = serving()
    status, body = ask(f"inbox/subscriptions/{NAME}/read", {"wait": 20})
    assert (status, [message["attempt"] for message in body["messages"]]) == (200, [4])
    assert ask(f"inbox/subscriptions/{NAME}/acknowledge", {"leases": [body["messages"][0]["lease"]]})[0] == 200
    assert InboxMessage.objects.get().state == "done"


def test_repeated_acknowledgement_is_accepted_although_the_server_is_killed_before_and_after_its_commit(local_world, serving):
    a_stored_message(local_world)
    _, ask = serving()
    _, body = ask(f"inbox/subscriptions/{NAME}/read", {"lease": 600})
    leases = {"leases": [body["messages"][0]["lease"]]}
    for point, state in ACKNOWLEDGING.items():
        killed(local_world, serving, point, f"inbox/subscriptions/{NAME}/acknowledge", leases)
        assert InboxMessage.objects.get().state == state, point

    assert ask(f"inbox/subscriptions/{NAME}/acknowledge", leases) == (200, {"settled": leases["leases"], "ended": []})


def is_due():
    return InboxMessage.objects.filter(next_attempt_at__lte=DatabaseTime()).exists()


STORING = {
    "before outbox.contrib.incoming_webhooks.views.publish": 0,
    "after outbox.contrib.incoming_webhooks.views.publish": 0,
    "after outbox.contrib.incoming_webhooks.views.Endpoint.store": 1,
}
"""Where the server is killed, and how many events are stored then."""
BODY = json.dumps({"operation": "paid-1", "how": ""}).encode()


def provide(port):
    """The status that the provider gets for its event."""
    timestamp = str(int(utcnow().timestamp()))
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    signature = base64.b64encode(hmac.digest(key, f"evt-1.{timestamp}.".encode() + BODY, hashlib.sha256)).decode()
    headers = {"webhook-id": "evt-1", "webhook-timestamp": timestamp, "webhook-signature": f"v1,{signature}"}
    return post(port, "/hook/", BODY, headers)[0]


@pytest.mark.every_database
def test_event_has_one_effect_although_the_server_is_killed_before_and_after_it_is_stored(local_world):
    for point, stored in STORING.items():
        server, port = local_world.web_server(f"kill {point}")
        with pytest.raises(OSError):  # noqa: PT011 - the connection ends without an answer
            provide(port)
        local_world.dead(server, point)
        assert OutboxMessage.objects.count() == stored

    _, port = local_world.web_server()
    assert provide(port) == 200
    assert OutboxMessage.objects.count() == 1
    local_world.relay()
    local_world.consumer()
    local_world.wait_until(lambda: local_world.inbox()["done"] == 1, "the event is handled")

    assert provide(port) == 200
    assert local_world.is_quiet()
    assert list(Effect.objects.values_list("name", flat=True)) == ["paid-1"]

"""A web server is killed while it stores an event: the provider repeats the event, and its effect happens once."""

import base64
import hashlib
import hmac
import http.client
import json

import pytest

from exactly_once.process.clock import utcnow
from outbox.models import OutboxMessage
from tests.support.apps.effects.models import Effect
from tests.support.crash.urls import SECRET
from tests.support.servers.private import LOOPBACK

POINTS = {
    "before outbox.contrib.incoming_webhooks.endpoint.publish": 0,
    "after outbox.contrib.incoming_webhooks.endpoint.publish": 0,
    "after outbox.contrib.incoming_webhooks.endpoint.Endpoint.store": 1,
}
"""Where the server is killed, and how many events are stored then."""
BODY = json.dumps({"operation": "paid-1", "how": ""}).encode()


def call(port):
    """The status that the provider gets for its event."""
    timestamp = str(int(utcnow().timestamp()))
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    signature = base64.b64encode(hmac.digest(key, f"evt-1.{timestamp}.".encode() + BODY, hashlib.sha256)).decode()
    headers = {"webhook-id": "evt-1", "webhook-timestamp": timestamp, "webhook-signature": f"v1,{signature}"}
    provider = http.client.HTTPConnection(LOOPBACK, port, timeout=60)
    try:
        provider.request("POST", "/hook/", BODY, headers)
        return provider.getresponse().status
    finally:
        provider.close()


@pytest.mark.every_database
def test_event_has_one_effect_although_the_server_is_killed_before_and_after_it_is_stored(local_world):
    for point, stored in POINTS.items():
        server, port = local_world.web_server(f"kill {point}")
        with pytest.raises(OSError):  # noqa: PT011 - the connection ends without an answer
            call(port)
        local_world.dead(server, point)
        assert OutboxMessage.objects.count() == stored

    _, port = local_world.web_server()
    assert call(port) == 200
    assert OutboxMessage.objects.count() == 1
    local_world.relay()
    local_world.consumer()
    local_world.wait_until(lambda: local_world.inbox()["done"] == 1, "the event is handled")

    assert call(port) == 200
    assert local_world.is_quiet()
    assert list(Effect.objects.values_list("name", flat=True)) == ["paid-1"]

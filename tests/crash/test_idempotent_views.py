"""A web server is killed at each step of an idempotent view; its client repeats the request until it is answered."""

import http.client
from contextlib import closing

import pytest

from exactly_once.contrib.views.models import IdempotentRequest
from tests.support.apps.effects.models import Effect
from tests.support.crash.points import COMMIT, EFFECT
from tests.support.servers.private import LOOPBACK

pytestmark = pytest.mark.every_database

KILLED = {
    "before exactly_once.contrib.views.answering.insert": 0,
    "after exactly_once.contrib.views.answering.insert": 0,
    f"after {EFFECT}": 0,
    "before exactly_once.contrib.views.models.IdempotentRequest.save": 0,
    "after exactly_once.contrib.views.models.IdempotentRequest.save": 0,
    f"before {COMMIT}": 0,
    f"after {COMMIT}": 1,
    "after exactly_once.contrib.views.answering.Idempotency.answer": 1,
}
"""Where the server is killed, and how many effects are committed then."""


@pytest.mark.parametrize(("point", "committed"), KILLED.items())
def test_request_has_one_effect_and_one_answer_although_the_server_is_killed_at_each_step(local_world, point, committed):
    local_world.environment["DJANGO_SETTINGS_MODULE"] = "tests.support.crash.views_settings"
    server, port = local_world.web_server(f"kill {point}")
    with pytest.raises(OSError):  # noqa: PT011 - the connection ends without an answer
        ask(port)
    local_world.dead(server, point)
    assert Effect.objects.count() == IdempotentRequest.objects.count() == committed

    _, port = local_world.web_server()
    answers = [answered(port) for _ in range(2)]

    assert Effect.objects.count() == IdempotentRequest.objects.count() == 1
    assert [status for status, *_ in answers] == [201, 201]
    assert [replayed for _, replayed, _ in answers] == ["true" if committed else None, "true"]
    assert len({body for *_, body in answers}) == 1


def answered(port):
    """The answer, once PostgreSQL has noticed that the first server is dead."""
    while (answer := ask(port))[0] == 409:
        pass
    return answer


def ask(port):
    with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=60)) as client:
        client.request("POST", "/function/", b"{}", {"Idempotency-Key": "k-1", "Client": "shop"})
        answer = client.getresponse()
        return answer.status, answer.getheader("Idempotency-Replayed"), answer.read()

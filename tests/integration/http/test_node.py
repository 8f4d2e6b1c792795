"""A client in another language: Node publishes, reads, dies, and another Node gets its messages again."""

import pytest
from django.test import override_settings

from inbox.contrib.http import subscribe
from inbox.models import InboxMessage
from inbox.states import State
from outbox.models import OutboxMessage
from outbox.testing import run_relay
from tests.support.http_api import HTTP, NodeClient

TOPIC = "shop.job"
JOBS = [f"job-{number}" for number in range(5)]


@pytest.fixture
def base(live_server, own_handlers):
    subscribe(TOPIC)
    with override_settings(ROOT_URLCONF="tests.support.http_urls", OUTBOX={"HTTP": HTTP}):
        yield f"{live_server.url}/api/"


@pytest.mark.long
@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
def test_messages_that_a_node_client_publishes_are_done_once_although_their_first_reader_dies(base):
    with NodeClient(base, "publish", TOPIC, *JOBS, *JOBS) as publisher:
        answers = publisher.ends()
    assert [answer["status"] for answer in answers] == [201] * 10
    assert OutboxMessage.objects.count() == 5

    with NodeClient(base, "read", TOPIC) as victim:
        run_relay()
        first = victim.says()["jobs"]
        with NodeClient(base, "work", TOPIC, "5") as worker:
            victim.kill()
            done = worker.ends()

    assert sorted(one["job"] for one in done) == JOBS
    assert {one["status"] for one in done} == {200}
    assert {one["job"] for one in done if one["attempt"] == 2} == {*first} != set()
    assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}

"""A queue of an ordered handler with large bodies is stored without taking much more memory than what is delivered."""

import json

import pytest

from inbox.models import InboxMessage
from inbox.states import State
from tests.support.apps.effects.models import Effect
from tests.support.apps.ordered import STEP
from tests.support.waiting import A_WHILE, wait_until_reached
from tests.support.workers import STEP_OF_THE_WORKERS, broker_options, declare, producing

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]


def send_large(url, count, megabytes):
    body = json.dumps({"fails": False, "large": "x" * (megabytes * 1024 * 1024)}).encode()
    json_text = {"content_type": "application/json", "content_encoding": "utf-8"}
    declare(STEP_OF_THE_WORKERS, broker_options(url))
    with producing(url) as produce:
        for number in range(count):
            headers = {"cloudEvents:orderingkey": f"key-{number % 10}"}
            produce(body, routing_key=STEP, message_id=f"{number:06}", headers=headers, **json_text)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("count", "megabytes", "most"),
    [
        pytest.param(40, 1, 100, id="40 bodies of 1 MB"),
        pytest.param(50, 6, 600, id="50 bodies of 6 MB", marks=pytest.mark.long),
    ],
)
def test_ordered_queue_with_large_bodies_is_handled_in_bounded_memory(command, rabbitmq_url, count, megabytes, most):
    # The default of such processes is less than a large body may take on a busy machine; then its attempt counts as lost.
    given = {"variables": {"BROKER_URL": rabbitmq_url}, "INBOX": {"GROUP": "tests", "REDELIVERY_AFTER": A_WHILE}}
    consumer = command("inbox_consume", "--concurrency", "2", app="ordered", **given)
    with consumer as process:
        process.until(lambda: "receiving from" in process.said())
        idle = process.peak_megabytes()
    send_large(rabbitmq_url, count, megabytes)

    with consumer as process:
        # A busy machine needs minutes for all of them.
        wait_until_reached(count, lambda: InboxMessage.objects.filter(state=State.DONE).count())
        peak = process.peak_megabytes()

    names = list(Effect.objects.order_by("id").values_list("name", "detail"))
    assert len(names) == count
    for key in {key for _, key in names}:
        assert [name for name, of in names if of == key] == sorted(name for name, of in names if of == key)
    assert InboxMessage.objects.filter(attempts=1).count() == count
    assert peak - idle < most

"""A worker whose pool's processes are killed again and again: each task's effect happens once, and no task is lost."""

import os
import signal

import pytest

from inbox.models import InboxMessage
from tests.integration.celery.handling.project import begun, release
from tests.support.apps.effects.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.timeout(300)]

KILLS = 17
WAIT = {"timeout": 60, "interval": 0.05}
QUORUM = {"task_default_queue_type": "quorum", "task_default_exchange_type": "topic"}
MOMENTS = ("wait until released", "wait after the commit")
"""A process is killed in its task's transaction, or between that commit and the acknowledgement."""


@pytest.mark.parametrize(
    ("broker", "given"),
    [
        pytest.param("rabbitmq", {}, id="rabbitmq"),
        pytest.param("rabbitmq", QUORUM, id="rabbitmq, quorum queues"),
        pytest.param("redis", {}, id="redis"),
    ],
    indirect=["broker"],
)
def test_tasks_of_pool_processes_killed_again_and_again_have_one_effect_each(app, tasks, worker, given):
    app.conf.update(given)
    held, twice = [f"held-{n}" for n in range(KILLS)], [f"twice-{n}" for n in range(KILLS)]
    with worker(concurrency=3, **given) as running:
        results = []
        for n in range(KILLS):
            results.append(tasks["shop.work"].delay(held[n], MOMENTS[n % 2]))
            results += [tasks["shop.charge"].delay({"id": twice[n]}) for _ in range(2)]
        killed = [kill_the_process_with(order_id, running) for order_id in held]
        for result in results:
            result.get(**WAIT)

    assert len(set(killed)) == KILLS
    assert sorted(Effect.objects.values_list("name", flat=True)) == sorted(held + twice)
    assert set(InboxMessage.objects.values_list("biz_id", "state")) == {(name, "done") for name in held + twice}


def kill_the_process_with(order_id, running):
    """Which process it was; the task may end when it is run again."""
    victim = running.until(lambda: begun(order_id))[0]
    os.kill(victim, signal.SIGKILL)
    release(order_id)
    return victim

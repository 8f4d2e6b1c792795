"""Tasks while processes are killed: each has its effect once, and a result that says so."""

import pytest

from inbox.contrib.tasks.compat import TaskResultStatus
from inbox.models import InboxMessage
from tests.support.apps.effects.models import Effect
from tests.support.apps.tasked import TASKS
from tests.support.crash.points import COMMIT, EFFECT, HAND_OVER, WRITE_RESULT
from tests.support.tasks import tasks

SETTINGS = "tests.support.apps.tasked.settings"
POINTS = {
    "after the message is handed over": f"after {HAND_OVER}",
    "after the effect": f"after {EFFECT}",
    "before the result is written": f"before {WRITE_RESULT}",
    "before the commit of the result": f"before {COMMIT} once {WRITE_RESULT}",
    "after the commit of the result": f"after {COMMIT} once {WRITE_RESULT}",
}


@pytest.mark.every_database
@pytest.mark.parametrize("name", POINTS)
def test_task_whose_process_is_killed_at_any_step_has_its_effect_and_its_result_once(local_world, settings, name):
    settings.TASKS = TASKS
    result = tasks().note.enqueue("a")
    local_world.dies_at(POINTS[name], local_world.relay)
    local_world.relay()
    local_world.wait_until(lambda: result.refresh() or result.is_finished, "the task has ended")

    assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, {"noted": ["a", ""]})
    assert Effect.objects.count() == 1


@pytest.mark.every_database
def test_failed_task_whose_process_is_killed_after_its_death_has_a_result(local_world, settings):
    settings.TASKS = TASKS
    result = tasks().fail.enqueue("a")
    local_world.dies_at(f"before {WRITE_RESULT}", local_world.relay)
    local_world.relay()
    local_world.wait_until(lambda: result.refresh() or result.finished_at, "the task has ended")

    assert (result.status, [error.exception_class for error in result.errors]) == (TaskResultStatus.FAILED, [KeyError])
    assert not Effect.objects.exists()


@pytest.mark.every_database
def test_task_under_a_lease_that_is_killed_after_its_result_and_has_no_attempt_left_is_successful(local_world, settings):
    settings.TASKS = TASKS
    result = tasks().charge.using(queue_name="mail").enqueue("a")
    local_world.dies_at(f"after {WRITE_RESULT}", local_world.relay)
    local_world.relay()
    about = InboxMessage.objects.filter(handler="tasks.mail.leased.on_dead", state="done")
    local_world.wait_until(about.exists, "its dead letter was handled")
    result.refresh()

    assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, f"charged {result.id}")


@pytest.mark.parametrize("name", ["before the commit of the result", "after the commit of the result"])
def test_task_whose_consumer_is_killed_has_its_effect_and_its_result_once(world, settings, name):
    settings.TASKS = TASKS
    result = tasks().note.enqueue("a")
    world.relay()
    world.dies_at(POINTS[name], world.consumer)
    world.consumer()
    world.wait_until(lambda: result.refresh() or (result.is_finished and world.is_quiet()), "the task has ended")

    assert (result.status, result.attempts) == (TaskResultStatus.SUCCESSFUL, 1)
    assert Effect.objects.count() == 1

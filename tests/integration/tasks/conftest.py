import pytest

from inbox.contrib.tasks.registering import register_queues
from tests.support.apps.tasked import TASKS
from tests.support.tasks import tasks


@pytest.fixture
def tasked(settings, own_handlers):
    """The tasks of `tests.support.apps.tasked`, on queues that are handlers."""
    settings.TASKS = TASKS
    register_queues()
    return tasks()

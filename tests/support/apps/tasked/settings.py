"""The settings of processes that are killed, with queues of tasks."""

from tests.support.apps import tasked
from tests.support.crash.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.apps.tasked"]
TASKS = tasked.TASKS

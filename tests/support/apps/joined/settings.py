"""The settings of processes that are killed, with a join, and a request and its answer."""

from tests.support.crash.settings import *  # noqa: F403
from tests.support.crash.settings import INSTALLED_APPS as _INSTALLED_APPS

INSTALLED_APPS = [*_INSTALLED_APPS, "tests.support.apps.joined"]

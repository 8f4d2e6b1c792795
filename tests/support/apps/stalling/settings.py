"""Settings of the processes: those of the crash tests, with these checkers and callbacks."""

from tests.support.crash.settings import *  # noqa: F403
from tests.support.crash.settings import INSTALLED_APPS as APPS

INSTALLED_APPS = [*APPS, "tests.support.apps.stalling"]

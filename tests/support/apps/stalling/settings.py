"""Settings of the processes: with these checkers and callbacks, and else as those of the crash tests."""

from tests.support.crash.settings import *  # noqa: F403
from tests.support.crash.settings import INSTALLED_APPS as APPS

INSTALLED_APPS = [*APPS, "tests.support.apps.stalling"]

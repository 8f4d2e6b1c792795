"""Settings of the processes: those of the crash tests, with these checkers and callbacks."""

from tests.support.crash.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.apps.stalling"]

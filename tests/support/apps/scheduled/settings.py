"""The settings of processes that are killed, with a schedule."""

from tests.support.crash.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.apps.scheduled"]

"""The settings of processes that are killed, with a join, and a request and its answer."""

from tests.support.crash.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.apps.joined"]

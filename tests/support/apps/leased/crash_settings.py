"""The settings of processes that are killed or frozen at named points, with handlers that run under a lease."""

from tests.support.crash.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.apps.leased"]

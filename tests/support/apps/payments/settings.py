"""The settings of processes that are killed at named points, with the handler of the page."""

from tests.support.crash.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.apps.payments"]

"""Settings of the processes of the example, which are killed as those of the other crash tests are."""

from tests.support.crash.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.apps.bank"]

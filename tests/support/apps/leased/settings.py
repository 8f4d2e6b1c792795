"""As `tests.support.apps.worker.settings`, with handlers that run under a lease."""

from tests.support.apps.worker.settings import *

INSTALLED_APPS = [*(name for name in INSTALLED_APPS if name != "tests.support.apps.worker"), "tests.support.apps.leased"]

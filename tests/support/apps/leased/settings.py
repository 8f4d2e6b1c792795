"""As `tests.support.apps.worker.settings`, with handlers that run under a lease."""

from tests.support.apps.worker.settings import *  # noqa: F403
from tests.support.apps.worker.settings import INSTALLED_APPS as _INSTALLED_APPS

INSTALLED_APPS = [*(name for name in _INSTALLED_APPS if name != "tests.support.apps.worker"), "tests.support.apps.leased"]

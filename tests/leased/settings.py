"""As `tests.worker.settings`, with handlers that run under a lease."""

from tests.worker.settings import *  # noqa: F403
from tests.worker.settings import INSTALLED_APPS as _INSTALLED_APPS

INSTALLED_APPS = [*(name for name in _INSTALLED_APPS if name != "tests.worker"), "tests.leased"]

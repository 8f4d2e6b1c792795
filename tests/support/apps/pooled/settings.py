"""As `tests.support.apps.worker.settings`, with handlers of every kind and a connection pool of Django's default size, four."""

from tests.support.apps.worker.settings import *  # noqa: F403
from tests.support.apps.worker.settings import DATABASES as _DATABASES
from tests.support.apps.worker.settings import INSTALLED_APPS as _INSTALLED_APPS

INSTALLED_APPS = [*_INSTALLED_APPS, "tests.support.apps.limited", "tests.support.apps.leased"]
DATABASES = {alias: {**given, "OPTIONS": {**given.get("OPTIONS", {}), "pool": True}} for alias, given in _DATABASES.items()}

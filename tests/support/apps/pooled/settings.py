"""As `tests.support.apps.worker.settings`, with handlers of every kind and a connection pool of Django's default size, four."""

from tests.support.apps.worker.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.apps.limited", "tests.support.apps.leased"]


def _pooled(given):
    # The template of processes reads these settings without DATABASE_URL, and the system checks of Django 6.1 connect.
    if given["ENGINE"].endswith(".sqlite3"):
        return given
    return {**given, "OPTIONS": {**given.get("OPTIONS", {}), "pool": True}}


DATABASES = {alias: _pooled(given) for alias, given in DATABASES.items()}

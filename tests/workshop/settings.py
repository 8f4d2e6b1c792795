from tests.settings import INSTALLED_APPS as _INSTALLED_APPS
from tests.worker.settings import *  # noqa: F403

INSTALLED_APPS = [*_INSTALLED_APPS, "tests.workshop"]

"""Those of `worker`, with the handlers of this app."""

from tests.support.apps.worker.settings import *  # noqa: F403
from tests.support.apps.worker.settings import INSTALLED_APPS as _INSTALLED_APPS

INSTALLED_APPS = [*_INSTALLED_APPS, "tests.support.apps.named"]

"""Those of `worker`, with the handlers of this app."""

from tests.support.apps.worker.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.apps.named"]

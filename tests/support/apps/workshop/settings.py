from tests.settings import INSTALLED_APPS as _INSTALLED_APPS
from tests.support.apps.worker.settings import *

INSTALLED_APPS = [*_INSTALLED_APPS, "tests.support.apps.workshop"]

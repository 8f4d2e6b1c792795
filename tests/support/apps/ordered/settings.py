"""Those of the processes that are killed, with the ordered handler."""

from tests.settings import INSTALLED_APPS as _INSTALLED_APPS
from tests.support.crash.settings import *

INSTALLED_APPS = [*_INSTALLED_APPS, "tests.support.apps.ordered"]

"""Those of the processes that are killed, with the ordered handler."""

from tests.crash.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as _INSTALLED_APPS

INSTALLED_APPS = [*_INSTALLED_APPS, "tests.ordered"]

"""What mypy takes Django's settings to be: the demo shop's, with the apps of the test suite. Nothing runs on these."""

from demo_shop.settings import *  # noqa: F403 - all of them, that is the point
from demo_shop.settings import INSTALLED_APPS as DEMO_APPS
from tests.settings import INSTALLED_APPS as TEST_APPS

INSTALLED_APPS = list(dict.fromkeys([*TEST_APPS, *DEMO_APPS]))

"""The theme django-grappelli"""

from tests.projects.settings.plain import *  # noqa: F403
from tests.projects.settings.plain import INSTALLED_APPS

INSTALLED_APPS = ["grappelli", *INSTALLED_APPS]

"""The theme django-jazzmin"""

from tests.projects.settings.plain import *  # noqa: F403
from tests.projects.settings.plain import INSTALLED_APPS

INSTALLED_APPS = ["jazzmin", *INSTALLED_APPS]

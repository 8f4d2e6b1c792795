"""The theme django-unfold"""

from tests.projects.settings.plain import *  # noqa: F403
from tests.projects.settings.plain import INSTALLED_APPS

INSTALLED_APPS = ["unfold", *INSTALLED_APPS]

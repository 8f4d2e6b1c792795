"""The theme django-grappelli"""

from tests.projects.settings.plain import *

INSTALLED_APPS = ["grappelli", *INSTALLED_APPS]

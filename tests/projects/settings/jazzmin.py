"""The theme django-jazzmin"""

from tests.projects.settings.plain import *

INSTALLED_APPS = ["jazzmin", *INSTALLED_APPS]

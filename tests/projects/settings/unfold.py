"""The theme django-unfold"""

from tests.projects.settings.plain import *

INSTALLED_APPS = ["unfold", *INSTALLED_APPS]

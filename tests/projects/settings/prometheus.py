"""The backend of django-prometheus"""

from tests.projects.settings.plain import *  # noqa: F403
from tests.projects.settings.plain import DATABASES, INSTALLED_APPS

INSTALLED_APPS = ["django_prometheus", *INSTALLED_APPS]
DATABASES["default"]["ENGINE"] = "django_prometheus.db.backends.postgresql"

"""The backend of django-prometheus"""

from tests.projects.settings.plain import *

INSTALLED_APPS = ["django_prometheus", *INSTALLED_APPS]
DATABASES["default"]["ENGINE"] = "django_prometheus.db.backends.postgresql"

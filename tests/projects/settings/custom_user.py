"""A model of users without a username"""

from tests.projects.settings.plain import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.projects.people"]
AUTH_USER_MODEL = "people.Person"

superuser = {"email": "admin@example.com"}

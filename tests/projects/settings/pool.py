"""Django's pool of connections (`OPTIONS["pool"]`)"""

from tests.projects.settings.plain import *  # noqa: F403
from tests.projects.settings.plain import DATABASES

DATABASES["default"]["OPTIONS"] = {"pool": {"min_size": 2, "max_size": 10}}

broker = True

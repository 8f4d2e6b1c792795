"""Django's pool of connections (`OPTIONS["pool"]`)"""

from tests.projects.settings.plain import *

DATABASES["default"]["OPTIONS"] = {"pool": {"min_size": 2, "max_size": 10}}

broker = True

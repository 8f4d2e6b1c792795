"""`OPTIONS["prepare_threshold"] = 0`: psycopg prepares every statement"""

from tests.projects.settings.plain import *

DATABASES["default"]["OPTIONS"] = {"prepare_threshold": 0}

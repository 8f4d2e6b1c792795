"""`SERIALIZABLE` as the isolation level of every transaction"""

from django.db.backends.postgresql.psycopg_any import IsolationLevel

from tests.projects.settings.plain import *

DATABASES["default"]["OPTIONS"] = {"isolation_level": IsolationLevel.SERIALIZABLE}

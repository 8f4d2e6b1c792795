"""The pool of django-db-connection-pool: a new wrapper around a connection at each checkout"""

from tests.projects.settings.plain import *

DATABASES["default"]["ENGINE"] = "dj_db_conn_pool.backends.postgresql"

broker = True

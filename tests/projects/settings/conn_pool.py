"""The pool of django-db-connection-pool: a new wrapper around a connection at each checkout"""

from tests.projects.settings.plain import *  # noqa: F403
from tests.projects.settings.plain import DATABASES

DATABASES["default"]["ENGINE"] = "dj_db_conn_pool.backends.postgresql"

broker = True

"""PgBouncer 1.21 or newer in transaction mode with `max_prepared_statements`, and `OPTIONS["prepare_threshold"]`"""

from tests.projects.settings.pgbouncer import *

DATABASES["default"]["OPTIONS"] = {"prepare_threshold": 0}
broker = True

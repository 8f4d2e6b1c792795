"""`CONN_HEALTH_CHECKS` and `CONN_MAX_AGE`"""

from tests.projects.settings.plain import *

DATABASES["default"].update(CONN_HEALTH_CHECKS=True, CONN_MAX_AGE=60)

broker = True

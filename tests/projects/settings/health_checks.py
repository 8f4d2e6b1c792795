"""`CONN_HEALTH_CHECKS` and `CONN_MAX_AGE`"""

from tests.projects.settings.plain import *  # noqa: F403
from tests.projects.settings.plain import DATABASES

DATABASES["default"].update(CONN_HEALTH_CHECKS=True, CONN_MAX_AGE=60)

broker = True

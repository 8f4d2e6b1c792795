"""`ATOMIC_REQUESTS`"""

from tests.projects.settings.plain import *  # noqa: F403
from tests.projects.settings.plain import DATABASES

DATABASES["default"]["ATOMIC_REQUESTS"] = True

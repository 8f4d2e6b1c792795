"""`ATOMIC_REQUESTS`"""

from tests.projects.settings.plain import *

DATABASES["default"]["ATOMIC_REQUESTS"] = True

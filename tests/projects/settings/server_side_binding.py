"""`OPTIONS["server_side_binding"]`"""

from tests.projects.settings.plain import *  # noqa: F403
from tests.projects.settings.plain import DATABASES

DATABASES["default"]["OPTIONS"] = {"server_side_binding": True}

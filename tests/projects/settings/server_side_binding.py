"""`OPTIONS["server_side_binding"]`"""

from tests.projects.settings.plain import *

DATABASES["default"]["OPTIONS"] = {"server_side_binding": True}

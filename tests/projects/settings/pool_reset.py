"""Django's pool of connections, with a `reset` that sends `DISCARD ALL`"""

from tests.projects.settings.plain import *


def _discard_all(connection):
    connection.autocommit = True
    connection.execute("DISCARD ALL")
    connection.autocommit = False


DATABASES["default"]["OPTIONS"] = {"pool": {"min_size": 1, "max_size": 10, "reset": _discard_all}}

"""`DATABASES["default"] = {}`, and a router"""

from tests.projects.settings.plain import *

DATABASES = {"default": {}, "main": DATABASES["default"]}
DATABASE_ROUTERS = ["tests.projects.settings.empty_default.Router"]
using = "main"


class Router:
    def db_for_read(self, model, **hints):
        return using

    db_for_write = db_for_read

    def allow_relation(self, first, second, **hints):
        return True

"""A router that keeps the inbox off a second database"""

import os

import dj_database_url
from django.db import connections

from tests.projects.settings.plain import *

DATABASES["second"] = dj_database_url.parse(os.environ["SECOND_DATABASE_URL"])
DATABASE_ROUTERS = ["tests.projects.settings.two_databases.Router"]


class Router:
    def allow_migrate(self, db, app_label, **hints):
        return app_label not in {"inbox", "inbox_joins"} if db == "second" else None


def after():
    assert not [name for name in connections["second"].introspection.table_names() if name.startswith("inbox")]

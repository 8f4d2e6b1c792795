"""PgBouncer in transaction mode, without server-side cursors"""

import os

import dj_database_url

from tests.projects.settings.plain import *

DATABASES = {"default": {**dj_database_url.parse(os.environ["POOLED_DATABASE_URL"]), "DISABLE_SERVER_SIDE_CURSORS": True}}

broker = True

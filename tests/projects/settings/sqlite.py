"""SQLite, with the options of *Getting started*, and `local://`"""

import os
from pathlib import Path

from tests.projects.settings.plain import *

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": Path(os.environ["CYCLE_DIRECTORY"], "project.sqlite3"),
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;",
        },
    }
}

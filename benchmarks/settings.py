"""Django settings of every process of the benchmarks.

DATABASE_URL and BROKER_URL say where; BENCH_OUTBOX holds what a benchmark changes of `OUTBOX`, as JSON with spans in seconds.
Everything not named here is the default, because the default is what is measured.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta

import dj_database_url

SECRET_KEY = "benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["outbox", "inbox", "benchmarks.shop"]
DATABASES = {"default": dj_database_url.parse(os.environ["DATABASE_URL"])}

_given = json.loads(os.environ.get("BENCH_OUTBOX", "{}"))
_spans = {"POLL_INTERVAL"}

OUTBOX = {
    "BROKER_URL": os.environ["BROKER_URL"],
    "SOURCE": "/benchmarks",
    **{name: timedelta(seconds=value) if name in _spans else value for name, value in _given.items()},
}
INBOX = {"GROUP": "benchmarks"}

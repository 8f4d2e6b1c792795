"""Django settings of every process of the benchmarks.

DATABASE_URL and BROKER_URL say where; BENCH_OUTBOX and BENCH_INBOX hold what a benchmark changes of `OUTBOX` and `INBOX`, as
JSON with durations in seconds; BENCH_HANDLER says which handler `benchmarks.shop` registers, and with which options.
Everything else has its default, because the benchmarks measure the defaults.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import dj_database_url

SECRET_KEY = "benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["exactly_once", "outbox", "inbox", "benchmarks.shop"]
DATABASES = {"default": dj_database_url.parse(os.environ["DATABASE_URL"])}


def _given(variable: str, *spans: str) -> dict[str, Any]:
    options = json.loads(os.environ.get(variable, "{}"))
    return {name: timedelta(seconds=value) if name in spans else value for name, value in options.items()}


OUTBOX = {
    "BROKER_URL": os.environ["BROKER_URL"],
    "SOURCE": "/benchmarks",
    **_given("BENCH_OUTBOX", "POLL_INTERVAL"),
}
INBOX = {"GROUP": "benchmarks", **_given("BENCH_INBOX")}

BENCH_HANDLER = {"kind": "orm", **_given("BENCH_HANDLER", "lease", "wait")}

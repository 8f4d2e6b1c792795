"""How long the pages of the admin take, in milliseconds, when the process is warm: one line of JSON for each page.

A line also has the plan of each query of the page, with the rows and buffers that it really read.
"""

from __future__ import annotations

import json
import time
from statistics import median
from typing import Any

import django
from django.conf import settings

from benchmarks.actors.looking import _Anybody

TIMES = 7
ADMIN = [
    *("django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes"),
    *("django.contrib.messages", "django.contrib.sessions", "django.contrib.staticfiles"),
]
PROCESSORS = ["django.template.context_processors.request", "django.contrib.auth.context_processors.auth"]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": PROCESSORS},
    }
]
OVERVIEW = "/admin/exactly_once/overview/"
OUTBOX, INBOX = "/admin/outbox/outboxmessage/", "/admin/inbox/inboxmessage/"
PAGES = {
    "overview": OVERVIEW,
    "overview: refresh": f"{OVERVIEW}figures/",
    "overview: charts of the hour": f"{OVERVIEW}figures/?charts=hour",
    "overview: charts of the day": f"{OVERVIEW}figures/?charts=day",
    "outbox: list": OUTBOX,
    "outbox: list of published": f"{OUTBOX}?state=published",
    "outbox: list of cancelled": f"{OUTBOX}?state=cancelled",
    "outbox: list of dead": f"{OUTBOX}?state=dead",
    "outbox: list of ready": f"{OUTBOX}?state=ready",
    "outbox: list of stuck": f"{OUTBOX}?stuck=any",
    "outbox: list of overdue": f"{OUTBOX}?stuck=overdue",
    "outbox: search for a topic": f"{OUTBOX}?q=bench.topic",
    "outbox: search for a biz-id": f"{OUTBOX}?q=old-1000",
    "outbox: list of scheduled": f"{OUTBOX}?state=scheduled",
    "outbox: list of a topic": f"{OUTBOX}?topic=bench.topic",
    "outbox: list of the last hour": f"{OUTBOX}?age=hour",
    "outbox: list of messages unsettled for a day": f"{OUTBOX}?age=open-day",
    "outbox: list of failed attempts": f"{OUTBOX}?attempts=5",
    "outbox: list of a host": f"{OUTBOX}?host=worker-1",
    "outbox: search in headers": f"{OUTBOX}?q=headers.tenant:acme",
    "outbox: search for a key": f"{OUTBOX}?q=key:customer-4",
    "inbox: list of failed attempts": f"{INBOX}?attempts=5",
    "inbox: search in headers": f"{INBOX}?q=headers.tenant:acme",
    "outbox: failure groups": "/admin/exactly_once/failurenote/",
    "inbox: list": INBOX,
    "inbox: list of done": f"{INBOX}?state=done",
    "inbox: list of skipped": f"{INBOX}?state=skipped",
    "inbox: list of dead": f"{INBOX}?state=dead",
    "inbox: list of stuck": f"{INBOX}?stuck=any",
    "inbox: list of overdue": f"{INBOX}?stuck=overdue",
    "inbox: list of duplicates": f"{INBOX}?duplicates=any",
    "inbox: search for a biz-id": f"{INBOX}?q=old-1000",
    "inbox: failure groups": "/admin/exactly_once/failurenote/",
    "database health": "/admin/exactly_once/databasehealth/",
}


class _Operator(_Anybody):
    pk = 1
    is_anonymous = False
    is_authenticated = True

    def has_usable_password(self) -> bool:
        return False

    def get_short_name(self) -> str:
        return "operator"

    get_username = get_short_name


def main() -> None:
    for name, address in PAGES.items():
        plans = _plans(address)
        print(
            json.dumps({"page": name, "milliseconds": 1000 * median(_seconds(address) for _ in range(TIMES)), "plans": plans})
        )


def _seconds(address: str) -> float:
    began = time.perf_counter()
    _visit(address)
    return time.perf_counter() - began


def _visit(address: str) -> None:
    from django.test import RequestFactory  # noqa: PLC0415 - settings first
    from django.urls import resolve  # noqa: PLC0415

    request: Any = RequestFactory().get(address)
    request.user, request.session = _Operator(), {}
    found = resolve(request.path)
    response = found.func(request, *found.args, **found.kwargs)
    if hasattr(response, "render"):
        response.render()
    if response.status_code != 200 or not response.content:
        raise ValueError(f"{address}: {response.status_code}")


def _plans(address: str) -> list[dict[str, Any]]:
    """Visit the page; each of its queries with its plan, explained where it is run, under the settings of its transaction."""
    from django.db import connection  # noqa: PLC0415 - settings first

    found: list[dict[str, Any]] = []

    def explain(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if sql.lstrip().startswith(("SELECT", "WITH")) and "set_config" not in sql:
            with connection.connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS) {sql}", parameters)
                found.append({"query": sql, "plan": [line for (line,) in cursor.fetchall()]})
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(explain):
        _visit(address)
    return found


if __name__ == "__main__":
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, *ADMIN]
    settings.TEMPLATES = TEMPLATES
    settings.STATIC_URL = "static/"
    settings.MIDDLEWARE = []
    settings.ROOT_URLCONF = "benchmarks.actors.urls"
    django.setup()
    main()

"""How long a page of the admin takes, in milliseconds, when the process is warm; without a page, the plans of the overview.

A process measures one page: the lab ends one that seems to do nothing for half a minute.
"""

from __future__ import annotations

import json
import sys
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
OVERVIEW = "/admin/outbox/overview/"
PAGES = {
    "overview": OVERVIEW,
    "overview: refresh": f"{OVERVIEW}figures/",
    "overview: charts of the hour": f"{OVERVIEW}figures/?charts=hour",
    "overview: charts of the day": f"{OVERVIEW}figures/?charts=day",
    "outbox: list": "/admin/outbox/outboxmessage/",
    "outbox: list of published": "/admin/outbox/outboxmessage/?state=published",
    "outbox: list of dead": "/admin/outbox/outboxmessage/?state=dead",
    "outbox: list of scheduled": "/admin/outbox/scheduledmessage/",
    "inbox: list": "/admin/inbox/inboxmessage/",
    "inbox: list of done": "/admin/inbox/inboxmessage/?state=done",
    "inbox: list of dead": "/admin/inbox/inboxmessage/?state=dead",
    "outbox: list of a topic": "/admin/outbox/outboxmessage/?topic=bench.topic",
    "outbox: list of the last hour": "/admin/outbox/outboxmessage/?age=hour",
    "outbox: list of what is not settled for a day": "/admin/outbox/outboxmessage/?age=open-day",
    "outbox: list of failed attempts": "/admin/outbox/outboxmessage/?attempts=5",
    "outbox: list of a host": "/admin/outbox/outboxmessage/?host=worker-1",
    "outbox: search in headers": "/admin/outbox/outboxmessage/?q=headers.tenant:acme",
    "outbox: search for a key": "/admin/outbox/outboxmessage/?q=key:customer-4",
    "inbox: list of failed attempts": "/admin/inbox/inboxmessage/?attempts=5",
    "inbox: search in headers": "/admin/inbox/inboxmessage/?q=headers.tenant:acme",
    "outbox: database health": "/admin/outbox/databasehealth/",
    "inbox: database health": "/admin/inbox/databasehealth/",
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
    if len(sys.argv) == 1:
        print(json.dumps(_plans(OVERVIEW)))
        return
    address = PAGES[sys.argv[1]]
    _seconds(address)
    print(json.dumps(1000 * median(_seconds(address) for _ in range(TIMES))))


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
    """Each query of the page, with its plan and the rows and buffers that it really read."""
    from django.db import connection  # noqa: PLC0415 - settings first

    asked: list[tuple[str, Any]] = []

    def keep(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        asked.append((sql, parameters))
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(keep):
        _visit(address)
    found = []
    for sql, parameters in asked:
        if not sql.lstrip().startswith(("SELECT", "WITH")) or "set_config" in sql:
            continue
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS) {sql}", parameters)
            found.append({"query": sql, "plan": [line for (line,) in cursor.fetchall()]})
    return found


if __name__ == "__main__":
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, *ADMIN]
    settings.TEMPLATES = TEMPLATES
    settings.STATIC_URL = "static/"
    settings.MIDDLEWARE = []
    settings.ROOT_URLCONF = "benchmarks.actors.urls"
    django.setup()
    main()

"""How long operators wait: the status and the admin's list of messages, in milliseconds, when the process is warm."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from statistics import median

import django
from django.conf import settings
from django.core.management import call_command
from django.test import RequestFactory

TIMES = 7
ADMIN = ["django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages"]


def main() -> None:
    looks = {"exactly_once_status": _status, "admin: list": _list(""), "admin: list of published": _list("state=published")}
    print(json.dumps({name: 1000 * median(_seconds(look) for _ in range(TIMES)) for name, look in looks.items()}))


def _seconds(look: Callable[[], object]) -> float:
    began = time.perf_counter()
    look()
    return time.perf_counter() - began


def _status() -> None:
    call_command("exactly_once_status", app="outbox", stdout=io.StringIO())


def _list(query: str) -> Callable[[], object]:
    from django.contrib.admin import AdminSite  # noqa: PLC0415 - its models need Django first

    from outbox.admin import OutboxMessageAdmin  # noqa: PLC0415
    from outbox.models import OutboxMessage  # noqa: PLC0415

    page = OutboxMessageAdmin(OutboxMessage, AdminSite())

    def look() -> None:
        request = RequestFactory().get(f"/?{query}")
        request.user = _Anybody()  # type: ignore[assignment]
        list(page.get_changelist_instance(request).result_list)

    return look


class _Anybody:
    is_active = is_staff = True

    def has_perm(self, *args: object) -> bool:
        return True

    def has_module_perms(self, *args: object) -> bool:
        return True


if __name__ == "__main__":
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, *ADMIN]
    django.setup()
    main()

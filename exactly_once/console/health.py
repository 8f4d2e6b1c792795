"""Health checks of both apps, as URLs: `path("health/", include("exactly_once.console.health"))`. A command makes them, too.

*Live*: the web process answers. *Ready*: the database is migrated, and the processes do their work according to their
heartbeats.

The checks of readiness run in a thread and on a connection of their own, because a frozen database never answers: a probe that
waits for it would itself look dead.

A view says no more than which check failed: no host name, no error text. The command says why.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from django.contrib.auth.decorators import login_not_required
from django.db import Error, router
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from exactly_once.console.cli.halves import UNAVAILABLE
from exactly_once.console.cli.halves import readiness as checked
from exactly_once.half import OK, Check, Half, halves
from exactly_once.models import Process
from exactly_once.sql.connections import without_atomic_requests
from exactly_once.sql.probing import Reading
from exactly_once.wire.text import describe

_LIMIT_SECONDS = 1.5
_lock = threading.Lock()
_readings: dict[tuple[object, ...], Reading[dict[str, list[Check]]]] = {}


def readiness(chosen: Sequence[Half], alias: str, *, everywhere: bool) -> Mapping[str, Sequence[Check]]:
    """The results of the checks, by app; the database is unavailable if they take longer than 1.5 s.

    A probe that comes while the same checks run waits for their results, so a frozen database holds one thread.
    """
    with _lock:
        reading = _readings.setdefault((alias, everywhere, *(half.app for half in chosen)), Reading("health", alias))
    try:
        return reading.result(
            lambda: {half.app: checked(half, alias, everywhere=everywhere) for half in chosen}, _LIMIT_SECONDS
        )
    except TimeoutError:
        said = _("no answer within %(seconds).1f s") % {"seconds": _LIMIT_SECONDS}
    except Error as error:
        said = describe(error)
    return {half.app: [Check(name="database", status=UNAVAILABLE, detail=said)] for half in chosen}


def ready(request: HttpRequest, *, app: str = "", database: str = "") -> HttpResponse:
    """200 if the service can do its work, and 503 if not."""
    chosen = [half for half in halves() if half.app == (app or half.app)]
    if not chosen:
        raise Http404
    found = readiness(chosen, database or router.db_for_write(Process), everywhere=True)
    healthy = all(check.is_ok for checks in found.values() for check in checks)
    shown = {name: {check.name: check.status for check in checks} for name, checks in found.items()}
    return JsonResponse({"status": OK if healthy else "failing", "checks": shown}, status=200 if healthy else 503)


def live(request: HttpRequest, **kwargs: object) -> HttpResponse:
    """200 as soon as the web process answers: it asks nothing else."""
    return JsonResponse({"status": OK})


def _probed(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    # With ATOMIC_REQUESTS an unavailable database would fail the request before the view can say so.
    return never_cache(require_safe(login_not_required(without_atomic_requests(view))))


app_name = "exactly_once_health"
urlpatterns = [
    path("live/", _probed(live), name="live"),
    path("ready/", _probed(ready), name="ready"),
    path("ready/<str:app>/", _probed(ready), name="ready"),
]

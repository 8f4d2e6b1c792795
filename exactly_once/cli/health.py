"""Health checks of both apps, as commands and as views.

*Live*: the loops of the process have moved lately. This needs neither the database nor the broker, so an outage of these does
not make a process look dead. *Ready*: the database is migrated, and the processes do their work according to their heartbeats.

The checks of readiness run in a thread and on a connection of their own, because a frozen database never answers: a probe that
waits for it would itself look dead.

A view says no more than which check failed: no host name, no error text. The command says why.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.core.management.base import CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, Error, connections
from django.db.transaction import non_atomic_requests
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from exactly_once.cli.command import TranslatedCommand
from exactly_once.cli.terminal import fitted
from exactly_once.process.life_sign import life_signs
from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.schema import why_unmigrated
from exactly_once.wire.text import describe

OK, UNKNOWN = "ok", "unknown"
UNAVAILABLE, NOT_MIGRATED, NONE_RUNNING = "unavailable", "not migrated", "none running"
_BROKER = "the broker"
_LIMIT_SECONDS = 1.5
_SHORT_TIMEOUTS = {
    "connect_timeout": 2,
    "tcp_user_timeout": 2_000,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 2,
}
"""Options of libpq, so that a connection that was cut off does not make later probes fail."""

Checks = Callable[[str], list["Check"]]


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked: "database", "broker", "relays".
        status: "ok", or what is wrong in a few words without secrets.
        detail: one line for the operator; it may quote a server.
    """

    name: str
    status: str = OK
    detail: str = ""

    @property
    def is_ok(self) -> bool:
        return self.status == OK


def answered_in_time(checks: Checks, alias: str) -> list[Check]:
    """The results of `checks`; the database is unavailable if they take longer than 1.5 s.

    A probe that comes while the same checks run waits for their results, so a frozen database holds one thread.
    """
    with _lock:
        probe = _probes.get((checks, alias))
        if probe is None:
            probe = _probes[checks, alias] = Future()
            threading.Thread(target=_probe, args=[probe, checks, alias], name="health", daemon=True).start()
    try:
        return probe.result(_LIMIT_SECONDS)
    except TimeoutError:
        said = _("no answer within %(seconds).1f s") % {"seconds": _LIMIT_SECONDS}
        return [Check(name="database", status=UNAVAILABLE, detail=said)]


_lock = threading.Lock()
_probes: dict[tuple[Checks, str], Future[list[Check]]] = {}


def _probe(probe: Future[list[Check]], checks: Checks, alias: str) -> None:
    try:
        connection = connections[alias]
        if is_postgresql(connection):
            given = {name: value for name, value in connection.settings_dict["OPTIONS"].items() if name != "pool"}
            connection.settings_dict = {**connection.settings_dict, "OPTIONS": {**given, **_SHORT_TIMEOUTS}}
        probe.set_result(checks(alias))
    except Error as error:
        probe.set_result([Check(name="database", status=UNAVAILABLE, detail=describe(error))])
    except Exception as error:  # noqa: BLE001 - the thread of the probe raises it
        probe.set_exception(error)
    finally:
        with _lock:
            del _probes[checks, alias]
        connections.close_all()


def check_database(alias: str, app: str) -> Check:
    """Is the database migrated for this version of the app?

    Raises:
        django.db.Error: it does not answer.
    """
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT 1")
    problem = why_unmigrated(alias, "exactly_once") or why_unmigrated(alias, app)
    return Check(name="database", status=NOT_MIGRATED, detail=problem) if problem else Check(name="database")


def check_processes(name: str, rows: Sequence[Any]) -> list[Check]:
    """Does one of the processes work, and do they reach the broker? According to their heartbeats.

    Args:
        name: what they are called: "relays".
        rows: heartbeats, see `operators.heartbeat_table`.
    """
    alive = [row for row in rows if not row.silent]
    if not alive:
        return [Check(name=name, status=NONE_RUNNING), Check(name="broker", status=UNKNOWN)]
    waits = [row.waits_for for row in alive]
    working = Check(name=name) if not all(waits) else Check(name=name, status="waiting", detail=waits[0])
    lost = all(reason.startswith(_BROKER) for reason in waits)
    return [working, Check(name="broker", status=UNAVAILABLE, detail=waits[0]) if lost else Check(name="broker")]


def check_life(kind: str) -> list[Check]:
    """Do the loops of every process of this kind move, on this host and of this user?"""
    found = life_signs(kind)
    if not found:
        return [Check(name=kind, status=NONE_RUNNING, detail=_("No process of this user on this host gives a life sign."))]
    return [
        Check(
            name=f"{kind} {sign.pid}",
            status=OK if sign.is_alive else "silent",
            detail=_("its loops moved %(seconds).1f s ago, the limit is %(limit).0f s")
            % {"seconds": sign.silent_seconds, "limit": sign.limit_seconds},
        )
        for sign in found
    ]


def of_this_host(rows: Sequence[Any], kind: str) -> list[Any]:
    """Of these heartbeats, those of the running processes of this host; all, if none gives a life sign here."""
    pids, host = {sign.pid for sign in life_signs(kind)}, socket.gethostname()
    return [row for row in rows if row.host == host and row.pid in pids] if pids else list(rows)


def ready_view(checks: Checks) -> Callable[..., HttpResponse]:
    """A view that answers 200 if all `checks` of the database are ok, and 503 if not."""

    def ready(request: HttpRequest, *, database: str = DEFAULT_DB_ALIAS) -> HttpResponse:
        """200 if the service can do its work."""
        return _as_response(answered_in_time(checks, database))

    return _probed(ready)


def live_view() -> Callable[..., HttpResponse]:
    """A view that answers 200 as soon as the web process answers: it asks nothing else."""

    def live(request: HttpRequest, **kwargs: Any) -> HttpResponse:
        return _as_response([Check(name="process")])

    return _probed(live)


def _probed(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    # With ATOMIC_REQUESTS an unavailable database would fail the request before the view can say so.
    for alias in connections:
        view = non_atomic_requests(alias)(view)
    return never_cache(require_safe(login_not_required(view)))


def _as_response(checks: Sequence[Check]) -> HttpResponse:
    healthy = all(check.is_ok for check in checks)
    body = {"status": OK if healthy else "failing", "checks": {check.name: check.status for check in checks}}
    return JsonResponse(body, status=200 if healthy else 503)


class HealthCommand(TranslatedCommand):
    """The command for probes: exits with 0 if every check is ok, and with 1 if not.

    Attributes:
        kind: of the processes it looks at, "relay" or "consumer".
    """

    # A probe has a few seconds, and these checks are made when the process starts.
    requires_system_checks = ()
    kind: str

    def readiness(self, alias: str) -> list[Check]:
        raise NotImplementedError

    def add_arguments(self, parser: CommandParser) -> None:
        which = parser.add_mutually_exclusive_group()
        which.add_argument(
            "--live", action="store_true", help=_("only whether the loops move; needs no database and no broker")
        )
        which.add_argument("--ready", action="store_true", help=_("only whether they can do their work"))
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias to look at (default: %(default)s)"))
        parser.add_argument("--json", action="store_true", help=_("print one JSON object"))

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        if alias not in connections:
            raise CommandError(f"There is no database {alias!r}. DATABASES has: {', '.join(connections)}.")
        checks = [] if options["ready"] else check_life(self.kind)
        checks += [] if options["live"] else answered_in_time(self.readiness, alias)
        if options["json"]:
            shown = [{"name": check.name, "status": check.status, "detail": check.detail} for check in checks]
            self.stdout.write(json.dumps({"status": OK if _all(checks) else "failing", "checks": shown}))
        else:
            self.stdout.write(fitted("\n".join(_line(check) for check in checks), self.stdout))
        if not _all(checks):
            raise SystemExit(1)


def _all(checks: Sequence[Check]) -> bool:
    return all(check.is_ok for check in checks)


def _line(check: Check) -> str:
    return f"{check.name}: {check.status}{check.detail and f' ({check.detail})'}"

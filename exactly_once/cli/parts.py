"""What each app adds to the commands and the health checks that are the same for both.

An app registers the name of its `Part` when Django is ready. The part is imported by the first command or view that asks for
it, so no other process pays for it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.apps import apps
from django.core.management.base import CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, connections, router
from django.db.models import Model
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from exactly_once.cli.terminal import BOLD, RED, YELLOW, Line, Table, age
from exactly_once.operators.dead_letters import Letters
from exactly_once.operators.operation_rows import OperationTable
from exactly_once.process.life_sign import LifeSign, life_signs
from exactly_once.sql.labels import label_of
from exactly_once.sql.schema import why_unmigrated

OK, UNKNOWN = "ok", "unknown"
UNAVAILABLE, NOT_MIGRATED, NONE_RUNNING = "unavailable", "not migrated", "none running"
_BROKER = "the broker"


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check of health.

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


class Part:
    """One app's part of the commands for both; a subclass has its tables.

    Attributes:
        app: its package.
        kind: of its processes, "relay".
        letters: its dead letters.
        store: the module with `purgeable` and `purge_settled`.
        trail: the model of the trail's entries.
        operations: its bulk operations.
        options: returns its settings.
    """

    app: str
    kind: str
    letters: Letters
    store: Any
    trail: type[Model]
    operations: OperationTable
    options: Callable[[], Any]

    def retention(self) -> timedelta:
        """How long settled messages are kept."""
        raise NotImplementedError

    def why_too_young(self, older_than: timedelta) -> str:
        """Why messages of this age must not be deleted, or "" if they may be."""
        return ""

    def status(self, alias: str, *, conflicts: bool) -> dict[str, Any]:
        """For `--json`."""
        raise NotImplementedError

    def tables(self, alias: str, rates: Callable[[str, int], str], *, conflicts: bool) -> list[Table]:
        """For people. `rates` shows how fast the count of a name changes."""
        raise NotImplementedError

    def heartbeats(self, alias: str) -> Sequence[Any]:
        """Of its processes that have not stopped."""
        raise NotImplementedError

    def life_signs(self) -> list[LifeSign]:
        """Of its running processes on this host."""
        return life_signs(self.kind)

    def further_checks(self, alias: str, heartbeats: Sequence[Any]) -> list[Check]:
        """Checks of health besides those of the database, the processes and the broker."""
        return []

    def readiness(self, alias: str, *, everywhere: bool) -> list[Check]:
        """Is the database migrated, and do the processes of any host, or of this one, do their work?

        Raises:
            django.db.Error: the database does not answer.
        """
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT 1")
        if problem := why_unmigrated(alias, "exactly_once") or why_unmigrated(alias, self.app):
            return [Check(name="database", status=NOT_MIGRATED, detail=problem)]
        rows = self.heartbeats(alias)
        if not everywhere and (pids := {sign.pid for sign in self.life_signs()}):
            rows = [row for row in rows if row.host == socket.gethostname() and row.pid in pids]
        return [Check(name="database"), *self._process_checks(rows), *self.further_checks(alias, rows)]

    def _process_checks(self, rows: Sequence[Any]) -> list[Check]:
        """Does one of the processes work, and do they reach the broker? According to their heartbeats."""
        name, alive = f"{self.kind}s", [row for row in rows if not row.silent]
        if not alive:
            return [Check(name=name, status=NONE_RUNNING), Check(name="broker", status=UNKNOWN)]
        waits = [row.waits_for for row in alive]
        working = Check(name=name) if not all(waits) else Check(name=name, status="waiting", detail=waits[0])
        lost = all(reason.startswith(_BROKER) for reason in waits)
        return [working, Check(name="broker", status=UNAVAILABLE, detail=waits[0]) if lost else Check(name="broker")]


_places: dict[str, str] = {}


def register_part(app: str, place: str) -> None:
    """Register the part of an app, when Django is ready. `place` is the dotted name of a `Part`."""
    _places[app] = place


def parts() -> list[Part]:
    """The registered parts, in the order of the apps in INSTALLED_APPS."""
    return [import_string(place)() for place in _places.values()]


def add_part_arguments(parser: CommandParser) -> None:
    parser.add_argument("--app", help=_("only outbox, or only inbox (default: both that are installed)"))
    parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias to work on (default: %(default)s)"))


def chosen_parts(options: dict[str, Any], **owners: str) -> list[Part]:
    """The parts that a command's options choose; without a choice, those that the routers allow on the database.

    Args:
        owners: options that only one app has, with its name. If such an option is given, that app is chosen.

    Raises:
        CommandError: that app is not installed or not chosen, or the alias does not exist.
    """
    alias, app, known = options["database"], options["app"], {part.app: part for part in parts()}
    if alias not in connections:
        raise CommandError(f"There is no database {alias!r}. DATABASES has: {', '.join(connections)}.")
    for option, owner in owners.items():
        if options[option]:
            if owner != (app or owner):
                words = _("--%(option)s is an option of the %(owner)s and does not go with --app %(app)s.")
                raise CommandError(words % {"option": option, "owner": owner, "app": app})
            if owner not in known:
                words = _("--%(option)s is an option of the %(owner)s, which is not in INSTALLED_APPS.")
                raise CommandError(words % {"option": option, "owner": owner})
            app = owner
    if app is None:
        return [part for part in known.values() if _is_routed(alias, part.app)] or list(known.values())
    if app not in known:
        words = _("--app is %(app)s: INSTALLED_APPS has %(known)s.")
        raise CommandError(words % {"app": repr(app), "known": ", ".join(known)})
    return [known[app]]


def _is_routed(alias: str, app: str) -> bool:
    return any(router.allow_migrate_model(alias, model) for model in apps.get_app_config(label_of(app)).get_models())


def iso(instant: datetime | None) -> str | None:
    return instant.isoformat() if instant else None


def process_as_json(process: Any, **particular: Any) -> dict[str, Any]:
    """A heartbeat, with the particular fields of its kind of process."""
    return {
        "id": str(process.id),
        "host": process.host,
        "pid": process.pid,
        "version": process.version,
        "started": iso(process.started_at),
        "beat": iso(process.beat_at),
        **particular,
        "waits_for": process.waits_for,
        "silent": process.silent,
    }


def processes(
    kind: str, heartbeats: Sequence[Any], columns: Sequence[tuple[object, Callable[[Any], str]]], state: Callable[[Any], Line]
) -> Table:
    """A line for each process: the common fields of a heartbeat, those of its kind, and its state."""
    head = [kind, _("version"), _("started"), _("heartbeat"), *(str(title) for title, _cell in columns), _("state")]
    lines = [
        Line(
            [
                f"{process.host}:{process.pid}",
                process.version,
                age(process.started_at, process.database_now),
                age(process.beat_at, process.database_now),
                *(cell(process) for _title, cell in columns),
                *state(process).cells,
            ],
            state(process).style,
        )
        for process in heartbeats
    ]
    return Table([Line(head, BOLD), *lines], texts=1)


def state_of(process: Any, also: str = "") -> Line:
    if process.silent:
        return Line([_("silent") + also], RED)
    if process.waits_for:
        return Line([_("waits for %(what)s") % {"what": process.waits_for} + also], YELLOW)
    return Line([_("working") + also])

"""What each app adds to the commands and the health checks that are the same for both.

An app registers the name of its `Part` when Django is ready. The part is imported by the first command or view that asks for
it, so no other process pays for it.
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from django.apps import apps
from django.core.management.base import CommandError, CommandParser
from django.db import connections, router
from django.db.models import Model
from django.utils.functional import Promise
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import TranslatedCommand
from exactly_once.console.cli.terminal import BOLD, RED, Line, Table, age
from exactly_once.console.operators.clock_ahead import Ahead, Dated, ahead
from exactly_once.console.operators.dead_letters import Letters
from exactly_once.console.operators.operation_rows import OperationTable
from exactly_once.models import Process
from exactly_once.process.life_sign import LifeSign, life_signs
from exactly_once.sql.labels import label_of
from exactly_once.sql.schema import require_schema, why_unmigrated
from exactly_once.upkeep.heartbeat_table import ProcessKind, process_kinds
from exactly_once.upkeep.history import History

OK, UNKNOWN = "ok", "unknown"
UNAVAILABLE, NOT_MIGRATED, NONE_RUNNING = "unavailable", "not migrated", "none running"


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
        processes: its kind of processes.
        kind: their name in the checks of health, "relay".
        letters: its dead letters.
        history: of its messages.
        remains: by name, what is deleted besides, each with `count` and `deletions`.
        dated: its rows that wait until an instant.
        trail: the model of the trail's entries.
        operations: its bulk operations.
        options: returns its settings.
    """

    processes: ProcessKind
    kind: str
    letters: Letters
    history: History
    remains: Mapping[str, Any] = MappingProxyType({})
    dated: Sequence[Dated] = ()
    trail: type[Model]
    operations: OperationTable
    options: Callable[[], Any]

    @property
    def app(self) -> str:
        """Its package."""
        return self.processes.app

    def retention(self) -> timedelta:
        """How long settled messages are kept."""
        raise NotImplementedError

    def prepare_purge(self, alias: str) -> None:
        """Before anything is deleted there."""

    def figures(self, alias: str, *, conflicts: bool) -> dict[str, Any]:
        """For `--json`."""
        raise NotImplementedError

    def tables(self, alias: str, rates: Callable[[str, int], str], *, conflicts: bool) -> Iterator[Table]:
        """The same for people. `rates` shows how fast the count of a name changes."""
        raise NotImplementedError

    def heartbeats(self, alias: str) -> Sequence[Any]:
        """Of its processes that have not stopped."""
        return list(self.processes.heartbeats.rows(alias))

    def life_signs(self) -> list[LifeSign]:
        """Of its running processes on this host."""
        return life_signs(self.kind)

    def ahead(self, alias: str) -> list[Ahead]:
        """The rows that wait because the database's clock was ahead."""
        return list(ahead(alias, self.dated))

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
        lost = all(row.without_broker for row in alive)
        return [working, Check(name="broker", status=UNAVAILABLE, detail=waits[0]) if lost else Check(name="broker")]


_places: dict[str, str] = {}


def register_part(app: str, place: str) -> None:
    """Register the part of an app, when Django is ready. `place` is the dotted name of a `Part`."""
    _places[app] = place


def parts() -> list[Part]:
    """The registered parts, in the order of the apps in INSTALLED_APPS."""
    return [import_string(place)() for place in _places.values()]


class PartsCommand(TranslatedCommand):
    """A command for the parts of both apps on one migrated database.

    Attributes:
        owners: its options that only one app has, with the name of that app.
    """

    help: Any = ""
    owners: ClassVar[Mapping[str, str]] = {}

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--app", help=_("only outbox, or only inbox (default: both that are installed)"))
        parser.add_argument(
            "--database", default=router.db_for_write(Process), help=_("alias to work on (default: %(default)s)")
        )

    def handle(self, *args: Any, **options: Any) -> None:
        chosen = chosen_parts(options, **self.owners)
        require_schema(options["database"], *(part.app for part in chosen))
        self.act(chosen, options)

    def act(self, chosen: list[Part], options: dict[str, Any]) -> None:
        """Do what the command is for."""
        raise NotImplementedError


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


def process_as_json(process: Any) -> dict[str, Any]:
    return {
        "id": str(process.id),
        "host": process.host,
        "pid": process.pid,
        "version": process.version,
        "started": process.started_at,
        "beat": process.beat_at,
        "last_pass": process.last_pass_at,
        "rate": None if process.silent else process.rate,
        **process.facts,
        "waits_for": process.waits_for,
        "silent": process.silent,
    }


def process_table(processes: Sequence[Any], *, brief: bool) -> Table:
    """A line for each process. A brief one has no identity and no resources, for the end of other tables."""
    columns = [column for column in _COLUMNS if column.is_brief or not brief]
    lines = [Line([column.cell(process) for column in columns], RED if process.silent else "") for process in processes]
    return Table([Line([str(column.title) for column in columns], BOLD), *lines], texts=1)


class _Column(NamedTuple):
    title: str | Promise
    cell: Callable[[Any], str]
    is_brief: bool = True


def _kind(process: Any) -> str:
    return str(next((kind.name for kind in process_kinds() if kind.app == process.app), process.app))


def _counts(process: Any) -> str:
    return ", ".join(count for kind in process_kinds() if kind.app == process.app for count in kind.counts(process))


def _heartbeat(process: Any) -> str:
    early = process.beat_at - process.database_now
    if process.silent and early > timedelta():
        return _("%(time)s ahead") % {"time": timedelta(seconds=int(early.total_seconds()))}
    return age(process.beat_at, process.database_now)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"


def _state(process: Any) -> str:
    if process.stopped_at:
        return _("stopped %(time)s ago") % {"time": age(process.stopped_at, process.database_now)}
    if process.has_stopped:
        return _("killed %(time)s ago, because it did not end in time") % {"time": age(process.beat_at, process.database_now)}
    states = [_("silent") if process.silent else str(process.mode)]
    if not process.silent:
        states += [_("waits for %(what)s") % {"what": what} for what in process.waits]
    if process.requested and not process.acknowledged_at:
        words = _("%(request)s is requested by %(user)s")
        states.append(words % {"request": process.requested, "user": process.requested_by})
    if "handlers" not in process.facts:
        return ", ".join(states)
    handlers = ", ".join(process.facts["handlers"]) or _("no handler")
    return f"{', '.join(states)}: {handlers}"


_COLUMNS = [
    _Column(gettext_lazy("process"), str),
    _Column(gettext_lazy("kind"), _kind),
    _Column("id", lambda process: str(process.pk)[:8], is_brief=False),
    _Column(gettext_lazy("version"), lambda process: process.version),
    _Column(gettext_lazy("started"), lambda process: age(process.started_at, process.database_now)),
    _Column(gettext_lazy("heartbeat"), _heartbeat),
    # The present rate of a silent process is unknown.
    _Column(gettext_lazy("per second"), lambda row: "-" if row.silent or row.has_stopped else f"{row.rate:,.1f}"),
    _Column(
        gettext_lazy("memory"),
        lambda process: "-" if process.memory_bytes is None else f"{process.memory_bytes / 2**20:,.0f} MB",
        is_brief=False,
    ),
    _Column(gettext_lazy("database"), lambda process: _milliseconds(process.database_ms), is_brief=False),
    _Column(gettext_lazy("broker"), lambda process: _milliseconds(process.broker_ms), is_brief=False),
    _Column(gettext_lazy("since its start"), _counts),
    _Column(gettext_lazy("state"), _state),
]

"""The commands and the checks of health that are the same for both halves."""

import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

from django.apps import apps
from django.core.management.base import CommandError, CommandParser
from django.db import connections, router
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import TranslatedCommand
from exactly_once.console.cli.terminal import BOLD, RED, Line, Table, age
from exactly_once.half import Check, Half, half_of, halves
from exactly_once.models import Process
from exactly_once.packages import label_of
from exactly_once.process.life_sign import LifeSign, life_signs
from exactly_once.sql.connections import execute
from exactly_once.sql.schema import require_alias, require_schema, why_unmigrated
from exactly_once.upkeep.heartbeat_table import HeartbeatTable

UNKNOWN, UNAVAILABLE, NOT_MIGRATED, NONE_RUNNING = "unknown", "unavailable", "not migrated", "none running"


def running(half: Half, alias: str) -> Sequence[Any]:
    """The heartbeats of its processes that have not stopped."""
    return list(HeartbeatTable(half.app).rows(alias))


def alive_here(half: Half) -> list[LifeSign]:
    """The life signs of the processes on this host that do its work."""
    return [sign for kind in half.status.kinds() for sign in life_signs(kind)]


def readiness(half: Half, alias: str, *, everywhere: bool) -> list[Check]:
    """Is the database migrated, and do the processes of any host, or of this one, do their work?

    Raises:
        django.db.Error: the database does not answer.
    """
    execute(connections[alias], "SELECT 1")
    if problem := why_unmigrated(alias, "exactly_once") or why_unmigrated(alias, half.app):
        return [Check(name="database", status=NOT_MIGRATED, detail=problem)]
    rows = running(half, alias)
    if not everywhere and (pids := {sign.pid for sign in alive_here(half)}):
        rows = [row for row in rows if row.host == socket.gethostname() and row.pid in pids]
    return [Check(name="database"), *_process_checks(f"{half.kind}s", rows), *half.status.checks(alias, rows)]


def _process_checks(name: str, rows: Sequence[Any]) -> list[Check]:
    """Does one of the processes work, and do they reach the broker? According to their heartbeats."""
    alive = [row for row in rows if not row.silent]
    if not alive:
        return [Check(name=name, status=NONE_RUNNING), Check(name="broker", status=UNKNOWN)]
    waits = [row.waits_for for row in alive]
    working = Check(name=name) if not all(waits) else Check(name=name, status="waiting", detail=waits[0])
    lost = all(row.without_broker for row in alive)
    return [working, Check(name="broker", status=UNAVAILABLE, detail=waits[0]) if lost else Check(name="broker")]


class HalvesCommand(TranslatedCommand):
    """A command for both halves on one migrated database.

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
        chosen = chosen_halves(options, **self.owners)
        require_schema(options["database"], *(half.app for half in chosen))
        self.act(chosen, options)

    def act(self, chosen: list[Half], options: dict[str, Any]) -> None:
        """Do what the command is for."""
        raise NotImplementedError


def chosen_halves(options: dict[str, Any], **owners: str) -> list[Half]:
    """The halves that a command's options choose; without a choice, those that the routers allow on the database.

    Args:
        owners: options that only one app has, with its name. If such an option is given, that app is chosen.

    Raises:
        CommandError: that app is not installed or not chosen, or the alias does not exist.
    """
    alias, app, known = options["database"], options["app"], {half.app: half for half in halves()}
    require_alias(alias)
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
        return [half for half in known.values() if _is_routed(alias, half.app)] or list(known.values())
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
    half = half_of(process.app)
    return str(half.kind_label if half else process.app)


def _counts(process: Any) -> str:
    half = half_of(process.app)
    return ", ".join(half.counts(process) if half else ())


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

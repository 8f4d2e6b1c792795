from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.cli.command import TranslatedCommand
from exactly_once.cli.terminal import BOLD, RED, Line, Table, age, sentence, show
from exactly_once.operators.audit import Actor, Subject, actor_of_command, record
from exactly_once.operators.heartbeat_table import HeartbeatTable, process_kinds
from exactly_once.process.requests import Request
from exactly_once.sql.schema import require_schema

_LEAST_OF_AN_ID = 4
_PROCESSES = HeartbeatTable()


class Command(TranslatedCommand):
    help = gettext_lazy(
        "List the processes, or pause, resume, drain or stop some of them. The request is stored in the database."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "request",
            nargs="?",
            default="list",
            metavar="REQUEST",
            choices=["list", *Request],
            help=_(
                "pause: begin no work; resume; drain: finish what is due and end; stop: finish what is in hand and end "
                "(default: list)"
            ),
        )
        parser.add_argument("processes", nargs="*", metavar="PROCESS", help=_("its id or the beginning of it, or host:pid"))
        parser.add_argument("--all", action="store_true", help=_("every process that has not stopped"))
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias to work on (default: %(default)s)"))

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        require_schema(alias)
        known = list(_PROCESSES.known(alias))
        if options["request"] == "list":
            show([_listed(known) if known else sentence(_("No process is known."))], self.stdout)
            return
        chosen = self._chosen(known, options["processes"], everyone=options["all"])
        request, actor, left = Request(options["request"]), actor_of_command(__name__), []
        for process in chosen:
            if not _request(alias, process, request, actor):
                left.append(process)
                continue
            words = _("%(process)s is asked to %(request)s. It reads that with its next heartbeat, within 2 s.")
            self.stdout.write(words % {"process": process, "request": request})
        if left:
            words = _("The request has no effect in the state of: %(processes)s.")
            raise CommandError(words % {"processes": ", ".join(map(str, left))})

    def _chosen(self, known: Sequence[Any], given: Sequence[str], *, everyone: bool) -> list[Any]:
        running = [process for process in known if process.stopped_at is None]
        if everyone:
            return running
        if not given:
            raise CommandError(_("Name the processes, or say --all. Without arguments this command lists them."))
        return [_named(name, running) for name in given]


def _request(alias: str, process: Any, request: Request, actor: Actor) -> bool:
    with transaction.atomic(using=alias):
        if not _PROCESSES.request(alias, process.pk, request, f"{actor.name} with {actor.place}"):
            return False
        record(process.app, alias, actor, request, [Subject(kind="process", id=str(process.pk), name=str(process))])
    return True


def _named(name: str, processes: Sequence[Any]) -> Any:
    found = [
        process
        for process in processes
        if name == str(process) or (len(name) >= _LEAST_OF_AN_ID and str(process.pk).startswith(name.lower()))
    ]
    if len(found) != 1:
        words = _("No running processes are called %(name)s. Use the id that the list shows.")
        if found:
            words = _("%(count)s running processes are called %(name)s. Use the id that the list shows.")
        raise CommandError(words % {"count": len(found), "name": repr(name)})
    return found[0]


def _listed(known: Sequence[Any]) -> Table:
    kinds = {kind.app: str(kind.name) for kind in process_kinds()}
    head = [
        *(_("process"), _("kind"), "id", _("version"), _("started"), _("heartbeat")),
        *(_("per second"), _("memory"), _("database"), _("broker"), _("state")),
    ]
    lines = [
        Line(
            [
                str(process),
                kinds.get(process.app, process.app),
                str(process.pk)[:8],
                process.version,
                age(process.started_at, process.database_now),
                age(process.beat_at, process.database_now),
                "-" if process.silent or process.stopped_at else f"{process.rate:,.1f}",
                "-" if process.memory_bytes is None else f"{process.memory_bytes / 2**20:,.0f} MB",
                _milliseconds(process.database_ms),
                _milliseconds(process.broker_ms),
                _state(process),
            ],
            RED if process.silent and not process.stopped_at else "",
        )
        for process in known
    ]
    return Table([Line(head, BOLD), *lines], texts=1)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"


def _state(process: Any) -> str:
    if process.stopped_at:
        return _("stopped %(time)s ago") % {"time": age(process.stopped_at, process.database_now)}
    states = [_("silent") if process.silent else str(process.mode)]
    if process.waits_for:
        states.append(_("waits for %(what)s") % {"what": process.waits_for})
    if process.requested and not process.acknowledged_at:
        words = _("%(request)s is requested by %(user)s")
        states.append(words % {"request": process.requested, "user": process.requested_by})
    return ", ".join(states)

from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import DatabaseCommand
from exactly_once.console.cli.halves import process_table
from exactly_once.console.cli.terminal import sentence, show
from exactly_once.console.operators.audit import Actor, Subject, record
from exactly_once.process.loop import Request
from exactly_once.upkeep.heartbeat_table import HeartbeatTable

_LEAST_OF_AN_ID = 4
_PROCESSES = HeartbeatTable()


class Command(DatabaseCommand):
    help = gettext_lazy(
        "List the processes, or pause, resume, drain or stop some of them. The request is stored in the database."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "request",
            nargs="?",
            default="list",
            metavar="REQUEST",
            choices=["list", *(request.value for request in Request)],
            help=_(
                "pause: begin no work; resume; drain: finish what is due and end; stop: finish what is in hand and end "
                "(default: list)"
            ),
        )
        parser.add_argument("processes", nargs="*", metavar="PROCESS", help=_("its id or the beginning of it, or host:pid"))
        parser.add_argument("--all", action="store_true", help=_("every process that has not stopped"))
        super().add_arguments(parser)

    def act(self, alias: str, actor: Actor, options: dict[str, Any]) -> None:
        known = list(_PROCESSES.known(alias))
        if options["request"] == "list":
            listed = process_table(known, brief=False) if known else sentence(_("No process is known."))
            show([listed], self.stdout)
            return
        request, left = Request(options["request"]), []
        chosen = _chosen(known, options["processes"], everyone=options["all"])
        if not chosen:
            self.stdout.write(_("No process is running."))
        for process in chosen:
            with transaction.atomic(using=alias):
                if not _PROCESSES.request(alias, process.pk, request, str(actor)):
                    left.append(str(process))
                    continue
                subject = Subject(kind="process", id=str(process.pk), name=str(process))
                record(process.app, alias, actor, request, [subject])
            words = _("%(process)s is asked to %(request)s. It reads that with its next heartbeat, within 2 s.")
            self.stdout.write(words % {"process": process, "request": request})
        if left:
            raise CommandError(_("The request has no effect in the state of: %(processes)s.") % {"processes": ", ".join(left)})


def _chosen(known: Sequence[Any], given: Sequence[str], *, everyone: bool) -> list[Any]:
    running = [process for process in known if not process.has_stopped]
    if everyone:
        return running
    if not given:
        raise CommandError(_("Name the processes, or say --all. Without arguments this command lists them."))
    return [_named(name, running) for name in given]


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

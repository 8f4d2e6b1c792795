import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, ClassVar

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.halves import HalvesCommand, process_as_json, process_table, running
from exactly_once.console.cli.live_view import LiveView, Rates
from exactly_once.console.cli.terminal import RED, Table, sentence, show
from exactly_once.console.operators.clock_ahead import ahead
from exactly_once.half import Half
from exactly_once.process.loop import StopRequest, running_until_signalled

_REDRAW_SECONDS = 2.0


class Command(HalvesCommand):
    owners: ClassVar = {"conflicts": "inbox"}
    help = gettext_lazy(
        "Show the number of messages in each state and the age of the oldest waiting one in the outbox and in the inbox, the "
        "pending callbacks, what is paused, and the running processes."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--json", action="store_true", help=_("print one JSON object"))
        parser.add_argument("--watch", action="store_true", help=_("show it again every two seconds, with rates, until Ctrl-C"))
        parser.add_argument(
            "--conflicts",
            action="store_true",
            help=_("only the inbox, and list the messages with the most recent duplicates of different content"),
        )

    def act(self, chosen: list[Half], options: dict[str, Any]) -> None:
        if options["json"]:
            found = {half.app: _as_json(half, options) for half in chosen}
            self.stdout.write(json.dumps(found, default=datetime.isoformat))
        elif options["watch"]:
            self._watch(chosen, options)
        else:
            show(list(_tables(chosen, options, lambda _name, _count: "")), self.stdout)

    def _watch(self, chosen: list[Half], options: dict[str, Any]) -> None:
        rates, words = Rates(), _("%(command)s of %(alias)s, every %(seconds)d s; Ctrl-C ends it")
        named = {"command": "exactly_once_status", "alias": repr(options["database"]), "seconds": _REDRAW_SECONDS}
        view = LiveView(lambda: list(_tables(chosen, options, rates)), title=words % named, every_seconds=_REDRAW_SECONDS)
        with running_until_signalled(StopRequest()) as stop:
            view.run(stop)


def _as_json(half: Half, options: dict[str, Any]) -> dict[str, Any]:
    alias = options["database"]
    figures = half.status.figures(alias, conflicts=options["conflicts"])
    figures["ahead_of_the_clock"] = [
        {"table": found.table, "rows": found.number, "seconds": found.by.total_seconds(), "statement": found.mend}
        for found in ahead(alias, half.dated)
    ]
    return {**figures, f"{half.kind}s": [process_as_json(process) for process in running(half, alias)]}


def _tables(chosen: list[Half], options: dict[str, Any], rates: Any) -> Iterator[Table]:
    alias = options["database"]
    for half in chosen:
        yield from half.status.tables(alias, rates, conflicts=options["conflicts"])
        if processes := running(half, alias):
            yield process_table(processes, brief=True)
        for found in ahead(alias, half.dated):
            yield sentence(_("%(problem)s To make them due now: %(mend)s") % {"problem": found, "mend": found.mend}, RED)
        if missing := half.missing(alias):
            yield sentence(missing, RED)

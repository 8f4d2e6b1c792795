from __future__ import annotations

import json
from typing import Any

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.cli.command import TranslatedCommand
from exactly_once.cli.live_view import LiveView, Rates
from exactly_once.cli.parts import Part, add_part_arguments, chosen_parts
from exactly_once.cli.terminal import Table, show
from exactly_once.process.loop import StopRequest, running_until_signalled
from exactly_once.sql.schema import require_schema

_REDRAW_SECONDS = 2.0


class Command(TranslatedCommand):
    help = gettext_lazy(
        "Show the number of messages in each state and the age of the oldest waiting one in the outbox and in the inbox, the "
        "pending callbacks, what is paused, and the running processes."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        add_part_arguments(parser)
        parser.add_argument("--json", action="store_true", help=_("print one JSON object"))
        parser.add_argument("--watch", action="store_true", help=_("redraw every two seconds, with rates, until q or Ctrl-C"))
        parser.add_argument(
            "--conflicts",
            action="store_true",
            help=_("only the inbox, and list the messages with the most recent duplicates of different content"),
        )

    def handle(self, *args: Any, **options: Any) -> None:
        chosen = chosen_parts(options, conflicts="inbox")
        require_schema(options["database"], *(part.app for part in chosen))
        if options["json"]:
            found = {part.app: part.status(options["database"], conflicts=options["conflicts"]) for part in chosen}
            self.stdout.write(json.dumps(found))
        elif options["watch"]:
            self._watch(chosen, options)
        else:
            show(_tables(chosen, options, lambda _name, _count: ""), self.stdout)

    def _watch(self, chosen: list[Part], options: dict[str, Any]) -> None:
        rates, words = Rates(), _("%(command)s of %(alias)s, every %(seconds)d s; q ends it")
        named = {"command": "exactly_once_status", "alias": repr(options["database"]), "seconds": _REDRAW_SECONDS}
        view = LiveView(lambda: _tables(chosen, options, rates), title=words % named, every_seconds=_REDRAW_SECONDS)
        with running_until_signalled(StopRequest()) as stop:
            view.run(stop)


def _tables(chosen: list[Part], options: dict[str, Any], rates: Any) -> list[Table]:
    alias, conflicts = options["database"], options["conflicts"]
    return [table for part in chosen for table in part.tables(alias, rates, conflicts=conflicts)]

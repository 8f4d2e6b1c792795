import json
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS

from outbox import store
from outbox.kernel.console import age, table, watch
from outbox.kernel.databases import require_table
from outbox.kernel.loop import StopRequest, running_until_signalled
from outbox.models import OutboxMessage


class Command(BaseCommand):
    help = "Show how many messages are in each state and how old the oldest waiting one is."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias to look at (default: %(default)s)")
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument("--watch", action="store_true", help="redraw every two seconds until Ctrl-C")

    def handle(self, *args: Any, **options: Any) -> None:
        require_table(options["database"], OutboxMessage)
        alias = options["database"]
        if options["json"]:
            oldest = store.oldest_waiting(alias)
            self.stdout.write(
                json.dumps({"states": store.states(alias), "oldest_waiting": oldest.isoformat() if oldest else None})
            )
        elif options["watch"]:
            with running_until_signalled(StopRequest()) as stop:
                watch(lambda: self._draw(alias), self.stdout.write, 2.0, stop)
        else:
            self.stdout.write(self._draw(alias))

    @staticmethod
    def _draw(alias: str) -> str:
        counts = [(state, f"{count:,}") for state, count in store.states(alias).items()]
        return table([("outbox", alias), *counts, ("oldest waiting", age(store.oldest_waiting(alias)))])

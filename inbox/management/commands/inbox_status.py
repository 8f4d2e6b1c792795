import json
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS

from inbox import store
from inbox.models import InboxMessage
from outbox.kernel.console import age, table, watch
from outbox.kernel.databases import require_table
from outbox.kernel.loop import StopRequest, running_until_signalled


class Command(BaseCommand):
    help = "Show how many messages are in each state, how many duplicates were suppressed, and the oldest waiting one."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias to look at (default: %(default)s)")
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument("--watch", action="store_true", help="redraw every two seconds until Ctrl-C")

    def handle(self, *args: Any, **options: Any) -> None:
        require_table(options["database"], InboxMessage)
        alias = options["database"]
        if options["json"]:
            oldest, duplicates = store.oldest_waiting(alias), store.duplicates(alias)
            self.stdout.write(
                json.dumps(
                    {
                        "states": store.states(alias),
                        "duplicates_suppressed": duplicates.suppressed,
                        "duplicates_conflicting": duplicates.conflicting,
                        "oldest_waiting": oldest.isoformat() if oldest else None,
                    }
                )
            )
        elif options["watch"]:
            with running_until_signalled(StopRequest()) as stop:
                watch(lambda: self._draw(alias), self.stdout.write, 2.0, stop)
        else:
            self.stdout.write(self._draw(alias))

    @staticmethod
    def _draw(alias: str) -> str:
        duplicates = store.duplicates(alias)
        return table(
            [
                ("inbox", alias),
                *((state, f"{count:,}") for state, count in store.states(alias).items()),
                ("duplicates suppressed", f"{duplicates.suppressed:,}"),
                ("of these with other content", f"{duplicates.conflicting:,}"),
                ("oldest waiting", age(store.oldest_waiting(alias))),
            ]
        )

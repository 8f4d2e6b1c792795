import gc
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS

from outbox.kernel.console import log_to_console
from outbox.kernel.databases import require_table
from outbox.models import OutboxMessage
from outbox.relay.service import serve


class Command(BaseCommand):
    help = "Carry committed messages to the broker, until SIGTERM. With local:// it also runs this service's handlers."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias whose outbox is relayed (default: %(default)s)")
        parser.add_argument("--drain", action="store_true", help="end when nothing is due instead of waiting for more")

    def handle(self, *args: Any, **options: Any) -> None:
        require_table(options["database"], OutboxMessage)
        log_to_console("outbox", options["verbosity"])
        log_to_console("inbox", options["verbosity"])
        # What is loaded by now stays for good. The collector need not walk through all of Django again and again, which
        # costs a tenth of the relay's speed.
        gc.collect()
        gc.freeze()
        serve(options["database"], drain=options["drain"])

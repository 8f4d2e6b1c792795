from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from inbox.consumer.service import serve
from outbox.kernel.console import log_to_console


class Command(BaseCommand):
    help = "Receive messages for this service's handlers and run due retries, until SIGTERM."
    requires_migrations_checks = True

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--drain", action="store_true", help="end when nothing is due instead of waiting for more")

    def handle(self, *args: Any, **options: Any) -> None:
        log_to_console("inbox", options["verbosity"])
        log_to_console("outbox", options["verbosity"])
        serve(drain=options["drain"])

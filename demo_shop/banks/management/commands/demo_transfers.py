from __future__ import annotations

import signal
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from demo_shop.banks import customer


class Command(BaseCommand):
    help = "Transfer money between the two banks of a run until SIGTERM. `manage.py demo` starts it, and kills it."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("run", help="the run, whose accounts are used")

    def handle(self, *args: Any, **options: Any) -> None:
        # No threading.Event: the code that the signal interrupts may hold its lock, and setting it would wait for ever.
        asked: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
        self._report("Transferring until SIGTERM.")
        customer.run(options["run"], lambda: bool(asked), self._report)

    def _report(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()

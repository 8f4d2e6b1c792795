from __future__ import annotations

import signal
import threading
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from demo_shop.simulation import transfers


class Command(BaseCommand):
    help = "Transfer money between the two banks of a run until SIGTERM. `manage.py demo` starts it, and kills it."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("run", help="the run, whose accounts are used")

    def handle(self, *args: Any, **options: Any) -> None:
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        self._tell("Transferring until SIGTERM.")
        transfers.run(options["run"], stop, self._tell)

    def _tell(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()

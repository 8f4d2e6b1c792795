from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import ProcessCommand
from exactly_once.process.loop import StopRequest
from exactly_once.sql.schema import require_usable
from inbox.conf import inbox_options
from inbox.contrib.outgoing_webhooks.fanning_out import aliases
from inbox.contrib.outgoing_webhooks.service import THREADS, serve


class Command(ProcessCommand):
    help = gettext_lazy("Send the messages to the webhook endpoints. On SIGTERM, finish the running requests and stop.")

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--drain", action="store_true", help=_("stop when no message is due, instead of waiting for more"))
        parser.add_argument(
            "--concurrency", type=int, default=THREADS, metavar="N", help=_("number of worker threads (default: %(default)s)")
        )
        super().add_arguments(parser)

    def grace(self) -> timedelta:
        return inbox_options().SHUTDOWN_GRACE

    def prepare(self, options: dict[str, Any]) -> Callable[[StopRequest], object]:
        if options["concurrency"] < 1:
            raise CommandError(f"--concurrency is {options['concurrency']}: it must be 1 or more.")

        def send(stop: StopRequest) -> None:
            known = aliases()
            for alias in known:
                require_usable(alias, "inbox")
            serve(known, drain=options["drain"], threads=options["concurrency"], stop=stop)

        return send

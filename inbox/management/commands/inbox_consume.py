from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.command import ProcessCommand
from exactly_once.process.loop import StopRequest
from exactly_once.sql.schema import require_usable
from exactly_once.telemetry import prometheus
from inbox.conf import inbox_options
from inbox.consumer.service import serve
from inbox.errors import UnknownHandler
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.monitoring import table_gauges


class Command(ProcessCommand):
    help = gettext_lazy(
        "Receive messages for this service's handlers and run due retries. On SIGTERM, finish the running messages and stop."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--drain", action="store_true", help=_("stop when no message is waiting or due, instead of waiting for more")
        )

        parser.add_argument(
            "--concurrency", type=int, metavar="N", help=_("number of worker threads (default: INBOX['CONCURRENCY'])")
        )
        chosen = parser.add_mutually_exclusive_group()
        chosen.add_argument("--handlers", metavar="NAMES", help=_("receive and run only these handlers: a,b"))
        chosen.add_argument("--except", metavar="NAMES", help=_("receive and run all handlers but these: a,b"))
        super().add_arguments(parser)
        prometheus.add_arguments(parser)

    def grace(self) -> timedelta:
        return inbox_options().SHUTDOWN_GRACE

    def prepare(self, options: dict[str, Any]) -> Callable[[StopRequest], object]:
        if options["concurrency"] is not None and options["concurrency"] < 1:
            raise CommandError(f"--concurrency is {options['concurrency']}: it must be 1 or more.")
        handlers = _chosen(options["handlers"], options["except"])
        prometheus.serve_metrics(options, *map(table_gauges, sorted({handler.using for handler in handlers})))

        def consume(stop: StopRequest) -> None:
            for alias in {handler.using for handler in handlers}:
                require_usable(alias, "inbox")
            serve(drain=options["drain"], concurrency=options["concurrency"], stop=stop, only=handlers)

        return consume


def _chosen(names: str | None, excepted: str | None) -> list[Handler]:
    try:
        chosen = registry.all() if names is None else registry.selected(names)
        left_out = [] if excepted is None else registry.selected(excepted)
    except UnknownHandler as error:
        raise CommandError(str(error)) from error
    handlers = [handler for handler in registry.all() if handler in chosen and handler not in left_out]
    if left_out and not handlers:
        raise CommandError(_("--except leaves no handler."))
    return handlers

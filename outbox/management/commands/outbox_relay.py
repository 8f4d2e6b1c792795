import gc
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.conf.masking import masked
from exactly_once.console.cli.command import ProcessCommand
from exactly_once.half import halves
from exactly_once.process.loop import StopRequest
from exactly_once.sql.schema import require_usable
from exactly_once.telemetry import prometheus
from exactly_once.transport.broker import is_local
from outbox.conf import outbox_options
from outbox.monitoring import table_gauges
from outbox.relay.service import serve
from outbox.store.dialect import database_of
from outbox.transports import transport_class, why_not_from


class Command(ProcessCommand):
    help = gettext_lazy(
        "Publish committed messages to the broker until SIGTERM. With local:// it also runs this service's handlers."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database", default=database_of(None), help=_("alias whose outbox is relayed (default: %(default)s)")
        )
        parser.add_argument("--drain", action="store_true", help=_("exit when nothing is due instead of waiting for more"))
        super().add_arguments(parser)
        prometheus.add_arguments(parser)

    def grace(self) -> timedelta:
        return outbox_options().SHUTDOWN_GRACE

    def prepare(self, options: dict[str, Any]) -> Callable[[StopRequest], object]:
        _require_transport(options["database"], outbox_options().BROKER_URL)
        prometheus.serve_metrics(options, table_gauges(options["database"]))
        return partial(_relay, options["database"], drain=options["drain"])


def _require_transport(alias: str, url: str) -> None:
    try:
        transport_class(url)
    except ImportError as error:
        raise CommandError(f"OUTBOX['BROKER_URL'] is {masked(url)}, which cannot be used: {error}.") from error
    if reason := why_not_from(alias, url):
        raise CommandError(f"OUTBOX['BROKER_URL'] is {masked(url)}, but {reason}. Use local://, or PostgreSQL.")
    if not is_local(url) and (reason := outbox_options().tls.why_unloadable()):
        raise CommandError(f"OUTBOX: {reason}.")


def _relay(alias: str, stop: StopRequest, *, drain: bool) -> None:
    # With local:// it stores into the inbox and runs its handlers.
    require_usable(alias, "outbox", *(["inbox"] if is_local(outbox_options().BROKER_URL) else []))
    # The objects loaded so far are permanent. Scanning all of Django in every collection would cost a tenth of the relay's
    # speed.
    halves()
    gc.collect()
    gc.freeze()
    serve(alias, drain=drain, stop=stop)

"""A management command that is a process: it works until it is asked to stop."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _

from exactly_once.console.cli import reloading
from exactly_once.console.cli.command import TranslatedCommand, log_to_console
from exactly_once.process.life_sign import HAS_FCNTL
from exactly_once.process.loop import StopRequest
from exactly_once.process.main_thread import run_until_signalled
from exactly_once.sql.connections import name_connections


class ProcessCommand(TranslatedCommand):
    help: Any = ""

    def add_arguments(self, parser: CommandParser) -> None:
        reloading.add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        if not HAS_FCNTL:
            raise CommandError(
                _(
                    "This process needs fcntl, which Windows does not have: run it on Linux or macOS, as in a container or "
                    "in WSL. Publishing and the admin work here."
                )
            )
        log_to_console(options["verbosity"])
        # Only there this process, with its arguments and connections, is that of the command.
        if self._called_from_command_line:
            name_connections(type(self).__module__.rpartition(".")[2])
            if reloading.is_wanted(options):
                raise SystemExit(reloading.supervise(self.grace()))
        work = self.prepare(options)

        def run(stop: StopRequest) -> None:
            reloading.stop_with_supervisor(stop)
            work(stop)

        run_until_signalled(run, grace=self.grace())

    def grace(self) -> timedelta:
        """How long the process may take to stop."""
        raise NotImplementedError

    def prepare(self, options: dict[str, Any]) -> Callable[[StopRequest], object]:
        """Check the options; return the work, which ends when it is asked to stop."""
        raise NotImplementedError

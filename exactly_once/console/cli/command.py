"""A management command of any app: its help text is translated, and what it prints is escaped."""

import logging
import sys
from typing import Any, ClassVar

from django.core.management.base import BaseCommand, CommandError, CommandParser, OutputWrapper
from django.db import DatabaseError, InterfaceError, router
from django.utils.translation import gettext as _

from exactly_once.console.operators.audit import Actor, actor_of_command
from exactly_once.models import Process
from exactly_once.sql.faults import is_outage
from exactly_once.sql.schema import our_apps, require_schema
from exactly_once.wire.text import describe, visible

_LEVELS = {0: logging.ERROR, 1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG}


class _Escaping(OutputWrapper):
    def write(self, msg: str = "", *args: Any, **kwargs: Any) -> Any:
        super().write(visible(msg), *args, **kwargs)


class TranslatedCommand(BaseCommand):
    """`help` may be a lazy translation; Django formats the help text itself, and needs a plain one.

    On the command line an unavailable database is one sentence; `--traceback` shows where it was needed.
    """

    help: Any = ""
    _called_from_command_line: bool

    def create_parser(self, *args: Any, **options: Any) -> CommandParser:
        self.help = str(self.help)
        return super().create_parser(*args, **options)

    def execute(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute(*args, **options)
        except (DatabaseError, InterfaceError) as error:
            if not self._called_from_command_line or not is_outage(error):
                raise
            raise CommandError(_("The database is unavailable: %(error)s") % {"error": describe(error)}) from error

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, OutputWrapper):  # Django sets stdout and stderr in two places
            value.__class__ = _Escaping
        super().__setattr__(name, value)


class DatabaseCommand(TranslatedCommand):
    """A command that works on one migrated database, with the option `--database`.

    Attributes:
        app: the package whose tables it needs besides those of both apps.
        refusals: exceptions of `act` whose text is for the operator.
    """

    help: Any = ""
    app: ClassVar[str] = "exactly_once"
    refusals: ClassVar[tuple[type[Exception], ...]] = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database", default=router.db_for_write(Process), help=_("alias to work on (default: %(default)s)")
        )

    def handle(self, *args: Any, **options: Any) -> None:
        require_schema(options["database"], self.app)
        try:
            self.act(options["database"], actor_of_command(type(self).__module__), options)
        except self.refusals as error:
            raise CommandError(str(error)) from error

    def act(self, alias: str, actor: Actor, options: dict[str, Any]) -> None:
        """Do what the command is for, in the name of `actor`."""
        raise NotImplementedError


def log_to_console(verbosity: int) -> None:
    """Log what our installed apps report to the console, unless the project's LOGGING already has a handler for it."""
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    for app in our_apps():
        logger = logging.getLogger(app.name)  # noqa: TID251 - to configure it
        if not logger.hasHandlers():
            logger.addHandler(console)
            logger.setLevel(_LEVELS[verbosity])

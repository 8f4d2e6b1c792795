"""A management command of any app: its help text is translated, and what it prints is escaped.

A `ProcessCommand` works until it is asked to stop. With `--reload` it starts again when the code of the project changes. The
command becomes a supervisor. It watches the files by Django's autoreloader, and runs the work in a child: the same command with
`--noreload`, which handles its signals and ends as it does in production. `runserver` runs its work beside the watcher, on a
thread that the interpreter's end cuts off.

The child stops, as after SIGTERM, when the other end of a socket is closed: after a change, after a signal to the supervisor,
and when the supervisor is killed. SIGTERM itself would be the second signal after Ctrl-C, which reaches both.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from django.apps import apps
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser, OutputWrapper
from django.db import DatabaseError, InterfaceError, router
from django.utils import autoreload
from django.utils.translation import gettext as _

from exactly_once.console.operators.audit import Actor, actor_of_command
from exactly_once.models import Process
from exactly_once.process.life_sign import HAS_FCNTL
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import StopRequest, running_until_signalled
from exactly_once.process.main_thread import run_until_signalled
from exactly_once.sql.connections import own_connections
from exactly_once.sql.faults import is_outage
from exactly_once.sql.schema import our_apps, require_schema
from exactly_once.wire.text import describe, visible

_LEVELS = {0: logging.ERROR, 1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG}
logger = escaping_logger(__name__)
_SOCKET = "EXACTLY_ONCE_STOP_SOCKET"
"""The environment variable of a child with its end of the socket."""
_INSTALLED = {"site-packages", "dist-packages"}
_MARGIN_SECONDS = 5.0


class _Escaping(OutputWrapper):
    def write(self, msg: str = "", *args: Any, **kwargs: Any) -> Any:
        super().write(visible(msg), *args, **kwargs)


class TranslatedCommand(BaseCommand):
    """`help` may be a lazy translation; Django formats the help text itself, and needs a plain one.

    On the command line an unavailable database, and an argument that is not UTF-8, is one sentence; `--traceback` shows where
    it was needed. `--no-color` applies to `rich`, too.
    """

    help: Any = ""
    _called_from_command_line: bool

    def create_parser(self, *args: Any, **options: Any) -> CommandParser:
        self.help = str(self.help)
        return super().create_parser(*args, **options)

    def execute(self, *args: Any, **options: Any) -> Any:
        if self._called_from_command_line and options.get("no_color"):
            os.environ["NO_COLOR"] = "1"  # for rich
        try:
            return super().execute(*args, **options)
        except UnicodeEncodeError as error:
            if not self._called_from_command_line or error.encoding != "utf-8":
                raise
            raise CommandError(_("An argument is not UTF-8: %(argument)s") % {"argument": ascii(error.object)}) from error
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


class ProcessCommand(TranslatedCommand):
    help: Any = ""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--reload",
            action="store_true",
            default=None,
            help=_("start again when the code changes (default: if DEBUG is on, but not with --drain)"),
        )
        parser.add_argument(
            "--noreload", dest="reload", action="store_false", help=_("do not start again when the code changes")
        )

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
            own_connections(type(self).__module__.rpartition(".")[2])
            if is_reloading_wanted(options):
                raise SystemExit(supervise(self.grace()))
        work = self.prepare(options)

        def run(stop: StopRequest) -> None:
            stop_with_supervisor(stop)
            work(stop)

        run_until_signalled(run, grace=self.grace())

    def grace(self) -> timedelta:
        """How long the process may take to stop."""
        raise NotImplementedError

    def prepare(self, options: dict[str, Any]) -> Callable[[StopRequest], object]:
        """Check the options; return the work, which ends when it is asked to stop."""
        raise NotImplementedError


def is_reloading_wanted(options: dict[str, Any]) -> bool:
    chosen = options["reload"]
    return bool(settings.DEBUG if chosen is None else chosen) and not options["drain"]


def supervise(grace: timedelta) -> int:
    """Run this command in a child, and in another one after each change; the exit status.

    A child that cannot start after a change, for example because of a typing error, is followed by another one after the next
    change. If the first one fails, or one ends that has begun its work, the command ends, so that a supervisor such as systemd
    notices.

    Args:
        grace: how long a child may take to stop.
    """
    changed: list[Path] = []

    def note(sender: object, file_path: Path, **kwargs: object) -> bool:
        changed.append(file_path)
        return True  # or else Django would end this process

    autoreload.file_changed.connect(note)
    reloader = autoreload.get_reloader()
    autoreload.autoreload_started.send(sender=reloader)
    for config in apps.get_app_configs():
        # Also modules that the code imports after a change.
        if _INSTALLED.isdisjoint(Path(config.path).parts):
            reloader.watch_dir(config.path, "**/*.py")
    with running_until_signalled(StopRequest()) as stop:
        child, is_first, is_reported = _Child(), True, False
        for _tick in reloader.tick():
            if stop:
                break
            if changed:
                logger.info("%s has changed: this process starts again.", changed[0])
                child.stop(grace)
                changed.clear()
                child, is_first, is_reported = _Child(), False, False
            elif (status := child.status()) is not None and not is_reported:
                if is_first or status == 0 or child.has_begun():
                    break
                logger.error("This process has ended with status %d. It starts again after the next change of a file.", status)
                is_reported = True
        return child.stop(grace)


class _Child:
    def __init__(self) -> None:
        self._end, other = socket.socketpair()
        arguments = [*autoreload.get_child_arguments(), "--noreload"]
        with other:
            end = other.fileno()
            self._process = subprocess.Popen(arguments, pass_fds=[end], env={**os.environ, _SOCKET: str(end)})  # noqa: S603 - ours

    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        status = self._process.poll()
        return 128 - status if status is not None and status < 0 else status

    def has_begun(self) -> bool:
        """Had it begun its work before it ended?"""
        return bool(self._end.recv(1))

    def stop(self, grace: timedelta) -> int:
        """Wait for its end; its exit status."""
        self._end.close()
        try:
            self._process.wait(grace.total_seconds() + _MARGIN_SECONDS)
        except subprocess.TimeoutExpired:  # as while it imports a module that never ends
            self._process.kill()
            self._process.wait()
        return self.status() or 0


def stop_with_supervisor(stop: StopRequest) -> None:
    """In a child that begins its work: set `stop` when the supervisor asks for it, or has ended."""
    end = os.environ.pop(_SOCKET, "")
    if end:
        threading.Thread(target=_stop_at_end, args=[int(end), stop], name="supervisor", daemon=True).start()


def _stop_at_end(end: int, stop: StopRequest) -> None:
    with suppress(OSError):  # the supervisor has ended
        os.write(end, b"b")
        os.read(end, 1)
    stop.set()

"""The commands `outbox_export` and `inbox_export`: write dead letters as JSON lines; see `dead_letters`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TextIO

from django.core.management.base import CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS
from django.db.models import QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.cli.command import TranslatedCommand
from exactly_once.cli.terminal import Progress
from exactly_once.operators.audit import Subject, actor_of_command, record
from exactly_once.operators.dead_letters import Letters
from exactly_once.plurals import ngettext
from exactly_once.sql.schema import require_schema

_STDOUT = "-"


class ExportCommand(TranslatedCommand):
    """See the module's docstring.

    Attributes:
        filters: options that select some messages, each named as its column, with their help texts.
    """

    help = gettext_lazy("Write dead letters as JSON lines, with their content as it is. The audit log records the export.")
    letters: Letters
    filters: ClassVar[Mapping[str, Any]]

    def rows(self, alias: str) -> QuerySet[Any]:
        """All dead letters."""
        raise NotImplementedError

    def named(self, message_ids: list[str]) -> list[Any]:
        """The message ids as their column has them."""
        raise NotImplementedError

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("message_ids", nargs="*", metavar="MESSAGE_ID", help=_("only these messages"))
        for name, meaning in self.filters.items():
            parser.add_argument(f"--{name}", help=str(meaning))
        only_its_owner = _("write to this file, which only its owner may read (default: to the standard output)")
        parser.add_argument("--output", default=_STDOUT, metavar="FILE", help=only_its_owner)
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias to work on (default: %(default)s)"))

    def handle(self, *args: Any, **options: Any) -> None:
        alias, message_ids = options["database"], options["message_ids"]
        require_schema(alias, self.letters.app)
        given = {name: options[name] for name in self.filters if options[name]}
        rows = self.rows(alias).filter(**given)
        if message_ids:
            rows = rows.filter(message_id__in=self.named(message_ids))
        with self._output(options["output"]) as output:
            total = rows.count()
            subject = Subject(kind="messages", name=f"{total} messages")
            parameters = {**given, "message_ids": message_ids, "output": options["output"]}
            record(self.letters.app, alias, actor_of_command(type(self).__module__), "export", [subject], parameters)
            progress = Progress(_("exported"), total)
            for line in self.letters.lines(rows):
                output.write(line)
                progress.advance(1)
            progress.finish()
        # Not to the standard output, which may have the lines.
        said = ngettext("%(count)s dead letter exported.", "%(count)s dead letters exported.", progress.done)
        self.stderr.write(said, self.style.SUCCESS)

    @contextmanager
    def _output(self, name: str) -> Iterator[Any]:
        if name == _STDOUT:
            yield self.stdout
            return
        try:
            file: TextIO = open(name, "w", encoding="utf-8", opener=_for_its_owner)  # noqa: SIM115 - closed below
        except OSError as error:
            raise CommandError(_("%(file)s cannot be written: %(why)s.") % {"file": name, "why": error.strerror}) from error
        with file:
            yield file


def _for_its_owner(name: str, flags: int) -> int:
    descriptor = os.open(name, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # an existing file keeps its mode otherwise
    return descriptor

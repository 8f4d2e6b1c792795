from typing import Any, ClassVar

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.halves import HalvesCommand
from exactly_once.console.cli.terminal import STANDARD, Progress, opened
from exactly_once.console.display import ngettext
from exactly_once.console.operators.audit import Subject, actor_of_command, record
from exactly_once.half import Half


class Command(HalvesCommand):
    """It writes JSON lines, see `operators.dead_letters`."""

    owners: ClassVar = {"handler": "inbox"}
    help = gettext_lazy("Write dead letters as JSON lines, with their content as it is. The audit log records the export.")

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("message_ids", nargs="*", metavar="MESSAGE_ID", help=_("only these messages"))
        parser.add_argument("--topic", help=_("messages of this topic"))
        parser.add_argument("--handler", help=_("messages of this handler of the inbox"))
        only_its_owner = _("write to this file, which only its owner may read (default: to the standard output)")
        parser.add_argument("--output", default=STANDARD, metavar="FILE", help=only_its_owner)
        super().add_arguments(parser)

    def act(self, chosen: list[Half], options: dict[str, Any]) -> None:
        with opened(options["output"], "w", self.stdout) as output:
            count = sum(_export(half, options, output) for half in chosen)
        # Not to the standard output, which may have the lines.
        said = ngettext("%(count)s dead letter exported.", "%(count)s dead letters exported.", count)
        self.stderr.write(said, self.style.SUCCESS)


def _export(half: Half, options: dict[str, Any], output: Any) -> int:
    alias, message_ids = options["database"], options["message_ids"]
    given = {name: options[name] for name in ("handler", "topic") if options[name]}
    rows = half.letters.rows(alias).filter(**given)
    if message_ids:
        rows = rows.filter(message_id__in=half.letters.ids(message_ids))
    total = rows.count()
    if total:
        subject = Subject(kind="messages", name=f"{total} messages")
        parameters = {**given, "message_ids": message_ids, "output": options["output"]}
        record(half.app, alias, actor_of_command(__name__), "export", [subject], parameters)
    exported = _("exported")
    with Progress(f"{half.app}: {exported}", total) as progress:
        for line in half.letters.lines(rows):
            output.write(line)
            progress.advance(1)
    return progress.done

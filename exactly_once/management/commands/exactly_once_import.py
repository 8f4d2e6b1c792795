import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError, transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.halves import HalvesCommand
from exactly_once.console.cli.terminal import opened
from exactly_once.console.operators.audit import actor_of_command, record
from exactly_once.console.operators.dead_letters import Letters, Refused, numbered, read
from exactly_once.half import Half
from exactly_once.sql.faults import is_about_values, is_collision
from exactly_once.wire.text import describe, visible

_IMPORTED, _KNOWN, _REFUSED = "imported", "known", "refused"


class Command(HalvesCommand):
    """Each line has a transaction of its own: a refused one does not affect the others, and an import can be repeated."""

    help = gettext_lazy(
        "Store dead letters from JSON lines, as dead letters: nothing is sent or run before an operator decides. A message "
        "that is here already is not changed. The exit status is 1 if a line was refused."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", metavar="FILE", help=_("the file to import; - for the standard input"))
        parser.add_argument("--dry-run", action="store_true", help=_("only report what would be imported"))
        super().add_arguments(parser)

    def act(self, chosen: list[Half], options: dict[str, Any]) -> None:
        counts = Counter[str]()
        with opened(options["file"], "rb", sys.stdin.buffer) as file:
            for number, line in numbered(file):
                outcome, said = _import(line, [half.letters for half in chosen], options)
                counts[outcome] += 1
                if outcome == _REFUSED or options["verbosity"]:
                    self.stdout.write(_("line %(number)s: %(outcome)s") % {"number": number, "outcome": visible(said)})
        words = _("%(imported)s would be imported, %(known)s here already, %(refused)s refused.")
        if not options["dry_run"]:
            words = _("%(imported)s imported, %(known)s here already, %(refused)s refused.")
        summary = words % {name: f"{counts[name]:,}" for name in (_IMPORTED, _KNOWN, _REFUSED)}
        if counts[_REFUSED]:
            raise CommandError(summary)
        self.stdout.write(summary)


def _import(line: bytes | None, known: Sequence[Letters], options: Mapping[str, Any]) -> tuple[str, str]:
    """The outcome of a line, and its report."""
    alias, actor = options["database"], actor_of_command(__name__)
    try:
        letters, values = read(line, known)
        with transaction.atomic(using=alias):
            state = letters.store(alias, values, f"imported by {actor.name} from {options['file']}")
            if not state:
                record(letters.app, alias, actor, "import", [letters.subject(values)], {"file": options["file"]})
            if options["dry_run"]:
                transaction.set_rollback(True, using=alias)
    except Refused as refused:
        return _REFUSED, _("refused: %(why)s") % {"why": refused}
    except DatabaseError as error:
        if not (is_about_values(error) or is_collision(error)):
            words = _("The database reported %(error)s. What was imported so far stays; repeat the command for the rest.")
            raise CommandError(words % {"error": describe(error)}) from error
        return _REFUSED, _("refused: the database reported %(error)s") % {"error": describe(error)}
    name = f"{letters.app}: {letters.subject(values).name}"
    if state:
        return _KNOWN, _("here already: %(message)s, %(state)s") % {"message": name, "state": state}
    return _IMPORTED, _("imported: %(message)s") % {"message": name}

from typing import Any

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.halves import HalvesCommand
from exactly_once.console.cli.terminal import BOLD, Line, Progress, Table, duration, show
from exactly_once.console.operators.audit import Subject, actor_of_command, record
from exactly_once.half import Half
from exactly_once.upkeep.housekeeping import delete_in_chunks, old_rows


class Command(HalvesCommand):
    help = gettext_lazy(
        "Delete settled messages older than KEEP_HISTORY, receipts older than INBOX['RETENTION'], then entries of the trail "
        "and of the audit log older than TRAIL_RETENTION and AUDIT_RETENTION, and bulk operations that ended longer ago than "
        "TRAIL_RETENTION. "
        "Open and dead messages stay. Relays and consumers do the same by themselves."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--older-than", metavar="AGE", help=_("the age of messages, as in 30d, instead of KEEP_HISTORY"))
        parser.add_argument("--dry-run", action="store_true", help=_("only count"))
        super().add_arguments(parser)

    def act(self, chosen: list[Half], options: dict[str, Any]) -> None:
        alias, given = options["database"], options["older_than"]
        ages = [half.retention() if given is None else duration("--older-than", given) for half in chosen]
        for half, older_than in zip(chosen, ages, strict=True):
            if not options["dry_run"]:
                half.before_purge(alias)
            messages = half.history.purgeable(alias, older_than)
            others = list(old_rows(half.app, alias, half.entries, half.options()))
            counts = {_("messages"): messages}
            counts |= {_(name): kind.count(alias) for name, kind in half.remains.items()}
            counts |= {str(old.name): old.rows.count() for old in others}
            verb = _("would be deleted")
            if not options["dry_run"]:
                verb = _("deleted")
                # First, because the deletion is many transactions.
                subject = Subject(kind="messages", name=f"{messages} messages")
                record(half.app, alias, actor_of_command(__name__), "purge", [subject], {"older_than": str(older_than)})
                deletions = [half.history.purge(alias, older_than), *(kind.deletions(alias) for kind in half.remains.values())]
                deletions += [delete_in_chunks(old.rows, by=old.by) for old in others]
                for (name, count), deletion in zip(list(counts.items()), deletions, strict=True):
                    with Progress(f"{half.app}: {name}", count) as progress:
                        for deleted in deletion:
                            progress.advance(deleted)
                    counts[name] = progress.done
            lines = [Line([name, f"{count:,}"]) for name, count in counts.items()]
            show([Table([Line([half.app, verb], BOLD), *lines])], self.stdout)

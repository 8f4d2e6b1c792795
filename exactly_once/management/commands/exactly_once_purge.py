from collections.abc import Iterable, Iterator
from typing import Any

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from exactly_once.console.cli.halves import HalvesCommand
from exactly_once.console.cli.terminal import BOLD, Line, Progress, Table, duration, show
from exactly_once.console.operators.audit import Subject, actor_of_command, record
from exactly_once.half import Half, halves
from exactly_once.sql.connections import with_table
from exactly_once.sql.schema import require_alias
from exactly_once.upkeep.housekeeping import OldRows, delete_in_chunks, old_rows, optional_old_rows

_Part = tuple[str, int, Iterator[int]]
"""What is deleted, how many there are, and the deletion, chunk by chunk."""


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

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        require_alias(alias)
        optional = list(optional_old_rows(alias))
        # A database may have the table of an optional app only.
        if not optional or options["app"] or any(with_table(half.messages, [alias])[0] for half in halves()):
            super().handle(*args, **options)
        if optional:
            self._purge("exactly_once", _parts(optional), dry_run=options["dry_run"])

    def act(self, chosen: list[Half], options: dict[str, Any]) -> None:
        alias, given = options["database"], options["older_than"]
        ages = [half.retention() if given is None else duration("--older-than", given) for half in chosen]
        for half, older_than in zip(chosen, ages, strict=True):
            if not options["dry_run"]:
                half.before_purge(alias)
            messages = half.history.purgeable(alias, older_than)
            parts = [
                (_("messages"), messages, half.history.purge(alias, older_than)),
                *((_(name), kind.count(alias), kind.deletions(alias)) for name, kind in half.remains.items()),
                *_parts(old_rows(half.app, alias, half.entries, half.options())),
            ]
            if not options["dry_run"]:
                # First, because the deletion is many transactions.
                subject = Subject(kind="messages", name=f"{messages} messages")
                record(half.app, alias, actor_of_command(__name__), "purge", [subject], {"older_than": str(older_than)})
            self._purge(half.app, parts, dry_run=options["dry_run"])

    def _purge(self, owner: str, parts: Iterable[_Part], *, dry_run: bool) -> None:
        lines = [Line([owner, _("would be deleted") if dry_run else _("deleted")], BOLD)]
        for name, count, deletion in parts:
            total = count
            if not dry_run:
                with Progress(f"{owner}: {name}", count) as progress:
                    for deleted in deletion:
                        progress.advance(deleted)
                total = progress.done
            lines.append(Line([name, f"{total:,}"]))
        show([Table(lines)], self.stdout)


def _parts(kinds: Iterable[OldRows]) -> list[_Part]:
    return [(str(old.name), old.rows.count(), delete_in_chunks(old.rows, by=old.by)) for old in kinds]

from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS

from outbox import store
from outbox.conf import outbox_options
from outbox.console.terminal import Progress, days
from outbox.kernel.schema import require_schema


class Command(BaseCommand):
    help = (
        "Delete published, cancelled, expired and rolled back messages that are older than the retention. Dead ones stay. "
        "Then the trail older than OUTBOX['TRAIL_RETENTION']."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--older-than-days", type=float, help="instead of OUTBOX['RETENTION']")
        parser.add_argument("--dry-run", action="store_true", help="only count")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias to work on (default: %(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        require_schema(options["database"], "outbox")
        given = options["older_than_days"]
        older_than = outbox_options().RETENTION if given is None else days("--older-than-days", given)
        count = store.purgeable(options["database"], older_than)
        if options["dry_run"]:
            self.stdout.write(f"{count} messages would be deleted.")
            if entries := store.purgeable_trail(options["database"], outbox_options().TRAIL_RETENTION):
                self.stdout.write(f"{entries} entries of the trail would be deleted.")
            return
        progress = Progress("deleted", count)
        for deleted in store.purge_settled(options["database"], older_than):
            progress.advance(deleted)
        progress.finish()
        self.stdout.write(f"{progress.done} messages deleted.")
        self._purge_trail(options["database"])

    def _purge_trail(self, alias: str) -> None:
        retention = outbox_options().TRAIL_RETENTION
        count = store.purgeable_trail(alias, retention)
        if not count:
            return
        progress = Progress("deleted of the trail", count)
        for deleted in store.purge_trail(alias, retention):
            progress.advance(deleted)
        progress.finish()
        self.stdout.write(f"{progress.done} entries of the trail deleted.")

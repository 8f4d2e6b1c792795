"""The command that deletes what is older than its retention, the same in both apps: `outbox_purge` and `inbox_purge`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS

from outbox.console.terminal import Progress, days
from outbox.kernel.schema import require_schema


class Purging(Protocol):
    """The store of an app."""

    def purgeable(self, alias: str, older_than: timedelta) -> int: ...
    def purge_settled(self, alias: str, older_than: timedelta) -> Iterator[int]: ...
    def purgeable_trail(self, alias: str, older_than: timedelta) -> int: ...
    def purge_trail(self, alias: str, older_than: timedelta) -> Iterator[int]: ...


class PurgeCommand(BaseCommand):
    """Settled messages first, then the trail."""

    app: str
    store: Purging
    older_than_help: str

    def retention(self) -> timedelta:
        raise NotImplementedError

    def trail_retention(self) -> timedelta:
        raise NotImplementedError

    def refuse(self, older_than: timedelta) -> None:
        """Raise a CommandError if deleting rows of this age would break a promise."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--older-than-days", type=float, help=self.older_than_help)
        parser.add_argument("--dry-run", action="store_true", help="only count")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias to work on (default: %(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        alias, given = options["database"], options["older_than_days"]
        require_schema(alias, self.app)
        older_than = self.retention() if given is None else days("--older-than-days", given)
        self.refuse(older_than)
        messages = self.store.purgeable(alias, older_than)
        if options["dry_run"]:
            self.stdout.write(f"{messages} messages would be deleted.")
            if entries := self.store.purgeable_trail(alias, self.trail_retention()):
                self.stdout.write(f"{entries} entries of the trail would be deleted.")
            return
        done = _finished(Progress("deleted", messages), self.store.purge_settled(alias, older_than))
        self.stdout.write(f"{done} messages deleted.")
        if entries := self.store.purgeable_trail(alias, self.trail_retention()):
            trail = self.store.purge_trail(alias, self.trail_retention())
            done = _finished(Progress("deleted of the trail", entries), trail)
            self.stdout.write(f"{done} entries of the trail deleted.")


def _finished(progress: Progress, deleted: Iterator[int]) -> int:
    for count in deleted:
        progress.advance(count)
    progress.finish()
    return progress.done

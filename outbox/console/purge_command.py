"""The purge command of both apps, which deletes rows older than their retention: `outbox_purge` and `inbox_purge`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS
from django.db.models import Model

from outbox.console.audit import Subject, actor_of_command, record
from outbox.console.terminal import Progress, days
from outbox.database.purging import delete_in_chunks, older_entries
from outbox.database.schema import require_schema


class PurgeCommand(BaseCommand):
    """Deletes settled messages first, then the trail, then the audit log.

    Attributes:
        store: the app's store, with `purgeable` and `purge_settled`.
        trail: the model of the trail's entries.
        configured: returns the app's options.
        retention: the option that says how long messages are kept.
    """

    app: str
    store: Any
    trail: type[Model]
    configured: Callable[[], Any]
    retention: str = "RETENTION"
    older_than_help: str

    def refuse(self, older_than: timedelta, retention: timedelta) -> None:
        """Raise a CommandError if deleting rows of this age would break a guarantee."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--older-than-days", type=float, help=self.older_than_help)
        parser.add_argument("--dry-run", action="store_true", help="only count")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="alias to work on (default: %(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        alias, given = options["database"], options["older_than_days"]
        require_schema(alias, self.app)
        configured = self.configured()
        retention: timedelta = getattr(configured, self.retention)
        older_than = retention if given is None else days("--older-than-days", given)
        self.refuse(older_than, retention)
        messages = self.store.purgeable(alias, older_than)
        entries = older_entries(self.trail, alias, configured.TRAIL_RETENTION)
        audit = older_entries(apps.get_model(self.app, "AuditEntry"), alias, configured.AUDIT_RETENTION)
        if options["dry_run"]:
            self.stdout.write(f"{messages} messages would be deleted.")
            if count := entries.count():
                self.stdout.write(f"{count} entries of the trail would be deleted.")
            if count := audit.count():
                self.stdout.write(f"{count} entries of the audit log would be deleted.")
            return
        # First, because the deletion is many transactions.
        subject = Subject(kind="messages", name=f"{messages} messages")
        parameters = {"older_than": str(older_than)}
        record(self.app, alias, actor_of_command(type(self).__module__), "purge", [subject], parameters)
        done = _finished(Progress("deleted", messages), self.store.purge_settled(alias, older_than))
        self.stdout.write(f"{done} messages deleted.")
        if count := entries.count():
            done = _finished(Progress("deleted of the trail", count), delete_in_chunks(entries, by="at"))
            self.stdout.write(f"{done} entries of the trail deleted.")
        if count := audit.count():
            done = _finished(Progress("deleted of the audit log", count), delete_in_chunks(audit, by="at"))
            self.stdout.write(f"{done} entries of the audit log deleted.")


def _finished(progress: Progress, deleted: Iterator[int]) -> int:
    for count in deleted:
        progress.advance(count)
    progress.finish()
    return progress.done

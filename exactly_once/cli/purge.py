"""The purge command of both apps, which deletes rows older than their retention: `outbox_purge` and `inbox_purge`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from django.core.management.base import CommandParser
from django.db import DEFAULT_DB_ALIAS
from django.db.models import Model, QuerySet
from django.utils.translation import gettext as _

from exactly_once.cli.command import TranslatedCommand
from exactly_once.cli.terminal import Progress, days
from exactly_once.models import AuditEntry
from exactly_once.operators.audit import Subject, actor_of_command, record
from exactly_once.operators.operation_rows import OperationTable
from exactly_once.plurals import ngettext
from exactly_once.sql.purging import delete_in_chunks, older_entries
from exactly_once.sql.schema import require_schema


class PurgeCommand(TranslatedCommand):
    """Deletes settled messages first, then the trail, the audit log and bulk operations that have ended.

    Attributes:
        store: the app's store, with `purgeable` and `purge_settled`.
        trail: the model of the trail's entries.
        operations: the app's bulk operations.
        configured: returns the app's options.
        retention: the option that says how long messages are kept.
    """

    app: str
    store: Any
    trail: type[Model]
    operations: OperationTable
    configured: Callable[[], Any]
    retention: str = "RETENTION"
    older_than_help: Any

    def refuse(self, older_than: timedelta, retention: timedelta) -> None:
        """Raise a CommandError if deleting rows of this age would break a guarantee."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--older-than-days", type=float, help=self.older_than_help)
        parser.add_argument("--dry-run", action="store_true", help=_("only count"))
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help=_("alias to work on (default: %(default)s)"))

    def handle(self, *args: Any, **options: Any) -> None:
        alias, given = options["database"], options["older_than_days"]
        require_schema(alias, self.app)
        configured = self.configured()
        retention: timedelta = getattr(configured, self.retention)
        older_than = retention if given is None else days("--older-than-days", given)
        self.refuse(older_than, retention)
        messages = self.store.purgeable(alias, older_than)
        others = list(self._others(alias, configured))
        if options["dry_run"]:
            self.stdout.write(ngettext("%(count)s message would be deleted.", "%(count)s messages would be deleted.", messages))
            for other in others:
                if count := other.rows.count():
                    self.stdout.write(other.would_be(count))
            return
        # First, because the deletion is many transactions.
        subject = Subject(kind="messages", name=f"{messages} messages")
        parameters = {"older_than": str(older_than)}
        record(self.app, alias, actor_of_command(type(self).__module__), "purge", [subject], parameters)
        done = _finished(Progress(_("deleted"), messages), self.store.purge_settled(alias, older_than))
        self.stdout.write(ngettext("%(count)s message deleted.", "%(count)s messages deleted.", done))
        for other in others:
            if count := other.rows.count():
                done = _finished(Progress(_("deleted"), count), delete_in_chunks(other.rows, by=other.by))
                self.stdout.write(other.were(done))

    def _others(self, alias: str, configured: Any) -> Iterator[_Kind]:
        """What is deleted besides messages."""
        yield _Kind(
            rows=older_entries(self.trail, alias, configured.TRAIL_RETENTION),
            would_be=partial(
                ngettext,
                "%(count)s entry of the trail would be deleted.",
                "%(count)s entries of the trail would be deleted.",
            ),
            were=partial(ngettext, "%(count)s entry of the trail deleted.", "%(count)s entries of the trail deleted."),
        )
        yield _Kind(
            rows=older_entries(AuditEntry, alias, configured.AUDIT_RETENTION).filter(app=self.app),
            would_be=partial(
                ngettext,
                "%(count)s entry of the audit log would be deleted.",
                "%(count)s entries of the audit log would be deleted.",
            ),
            were=partial(ngettext, "%(count)s entry of the audit log deleted.", "%(count)s entries of the audit log deleted."),
        )
        yield _Kind(
            rows=self.operations.ended(alias, configured.OPERATION_RETENTION),
            by="ended_at",
            would_be=partial(
                ngettext,
                "%(count)s bulk operation would be deleted.",
                "%(count)s bulk operations would be deleted.",
            ),
            were=partial(ngettext, "%(count)s bulk operation deleted.", "%(count)s bulk operations deleted."),
        )


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Old rows of one kind, the field of their order, and the reports of their number."""

    rows: QuerySet[Any]
    by: str = "at"
    would_be: Callable[[int], str]
    were: Callable[[int], str]


def _finished(progress: Progress, deleted: Iterator[int]) -> int:
    for count in deleted:
        progress.advance(count)
    progress.finish()
    return progress.done

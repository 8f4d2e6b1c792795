"""Deletes settled messages: not those of handlers that only processes of other services have.

`RETENTION` is the deduplication window of a service. Of several services on one database, each deletes the messages of its own
handlers, those of Celery tasks and webhook endpoints, and those of handlers that no process has lately run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import connections, transaction
from django.db.models import Q

from exactly_once.sql.now import NOW_AFTER, DatabaseTime
from inbox.handlers.registry import may_exist
from inbox.models import SETTLED, InboxMessage, Step
from inbox.store import receipts
from inbox.store.dialect import TABLE
from inbox.store.heartbeats import lately_running_handlers

deleted_together: list[Callable[[str, Sequence[int]], object]] = []
"""Called with the alias and the ids of rows that are being purged, in their transaction. An optional package that stores more
about a row deletes it here."""


def purge_settled(alias: str, older_than: timedelta, *, chunk: int = 1000, since: datetime | None = None) -> Iterator[int]:
    """Delete settled rows older than `older_than`, in small transactions; yields the number deleted by each.

    Args:
        since: rows that were settled before are not read; None reads all.

    Open and dead messages stay until they are settled. A row also stays for `older_than` after its latest duplicate with other
    content: it may have the only copy of that content, or be what makes further copies of it duplicates.
    """
    old = _settled_before(alias, older_than).order_by("settled_at").values_list("pk", "settled_at")
    while found := list((old if since is None else old.filter(settled_at__gte=since))[:chunk]):
        yield _delete(alias, [pk for pk, _ in found], older_than)
        # There may be many rows that stay, and each chunk would read them again. SQLite's instants have milliseconds.
        since = found[-1][1] - timedelta(milliseconds=1)


def _delete(alias: str, ids: Sequence[int], older_than: timedelta) -> int:
    """Delete rows by SQL: Django's delete() would first read every row with its body, because steps refer to it."""
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        places = ", ".join(["%s"] * len(ids))
        cursor.execute(
            # A duplicate with other content may have come since they were selected.
            f"DELETE FROM {TABLE} WHERE id IN ({places}) AND state IN ('done', 'skipped', 'shed') "
            f"AND (conflicting_at IS NULL OR conflicting_at < {NOW_AFTER[connections[alias].vendor]}) RETURNING id",
            [*ids, -older_than.total_seconds()],
        )
        deleted = [row for (row,) in cursor.fetchall()]
        receipts.delete_of(alias, deleted)
        Step.objects.using(alias).filter(message_id__in=deleted).delete()
        for delete in deleted_together:
            delete(alias, deleted)
        return len(deleted)


def purgeable(alias: str, older_than: timedelta) -> int:
    """How many rows `purge_settled` would delete."""
    count: int = _settled_before(alias, older_than).count()
    return count


def _settled_before(alias: str, older_than: timedelta) -> Any:
    before = DatabaseTime(-older_than)
    of_others = [name for name in lately_running_handlers(alias) if not may_exist(name)]
    settled = InboxMessage.objects.using(alias).filter(state__in=SETTLED, settled_at__lt=before).exclude(handler__in=of_others)
    return settled.filter(Q(conflicting_at=None) | Q(conflicting_at__lt=before))
